"""An HTTP server as a component."""

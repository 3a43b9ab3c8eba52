"""The Frontend in front of HTTP servers: passes requests on and streams answers back."""

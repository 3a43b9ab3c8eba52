"""The page's process, beside the arbiter: reads status and logs, keeps a history, and serves one page."""

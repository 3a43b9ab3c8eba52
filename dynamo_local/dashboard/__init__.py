"""In the page's process, beside the arbiter: it reads what the arbiter says and logs, keeps a history, and serves one page."""

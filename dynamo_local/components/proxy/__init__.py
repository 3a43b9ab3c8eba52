"""OpenAI's API in front of HTTP servers that we run: requests and answers pass as the bytes they are."""

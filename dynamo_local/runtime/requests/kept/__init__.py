"""Connections that outlive an answer, so that the next request to the same worker needs neither NATS nor a new one.

One request at a time: while it is answered the connection is that answer's alone, with its flow control, and closing
it cancels the request. Only an answer that ended well leaves it open. A connection that breaks before a request was
taken says nothing about its worker: the request goes by NATS then.
"""

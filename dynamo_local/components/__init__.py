"""The components that ship: Frontend, Processor, VllmWorker, PrefillWorker."""

"""The policy `slo`: as few GPUs as keep the targets."""

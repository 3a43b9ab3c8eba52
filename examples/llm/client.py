"""Stream one chat from a running graph: `python client.py "Tell me a story" --max-tokens 64`.

Uses the `openai` package (`pip install openai`); any OpenAI client works.
"""

from __future__ import annotations

import argparse
import sys
import time

from openai import OpenAI


def main() -> None:
    """Print the text as it comes, then what it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="Tell me a story.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="as `dynamo status` says it")
    parser.add_argument("--model", default=None, help="default: the first that is served")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    client = OpenAI(base_url=f"{args.url.rstrip('/').removesuffix('/v1')}/v1", api_key="none")
    model = args.model or next(iter(client.models.list())).id
    started_s, first_s = time.perf_counter(), None
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": args.prompt}],
        max_tokens=args.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.delta.content:
                first_s = first_s or time.perf_counter()
                print(choice.delta.content, end="", flush=True)
    took_s = time.perf_counter() - started_s
    ttft_ms = ((first_s or time.perf_counter()) - started_s) * 1000
    tokens = usage.completion_tokens if usage else 0
    print(f"\n\n[{tokens} tokens in {took_s:.2f} s, the first after {ttft_ms:.0f} ms]", file=sys.stderr)


if __name__ == "__main__":
    main()

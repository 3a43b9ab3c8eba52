"""`python -m tests.tools.vendor` fetches what the page uses of others from the npm registry, by version and hash.

    python -m tests.tools.vendor                  # write dynamo_local/dashboard/static/vendor
    python -m tests.tools.vendor --check          # fail if a file there is not as the registry has it
    python -m tests.tools.vendor --tests FOLDER   # fetch what only the browser tests need (axe-core)

The page has no build step. A user needs no npm: the files are in the repository and in the wheel.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
VENDOR = ROOT / "dynamo_local" / "dashboard" / "static" / "vendor"
REGISTRY = "https://registry.npmjs.org"
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Package:
    """One package of the registry, and which of its files become which of ours."""

    name: str
    version: str
    licence: str
    sha512: str
    files: Mapping[str, str]
    rewrites: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        registry = os.environ.get("NPM_CONFIG_REGISTRY", REGISTRY).rstrip("/")
        return f"{registry}/{self.name}/-/{self.name}-{self.version}.tgz"


PAGE = (
    Package(
        "uplot",
        "1.6.32",
        "MIT",
        "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        {"dist/uPlot.iife.min.js": "uplot.js", "dist/uPlot.min.css": "uplot.css", "LICENSE": "uplot.LICENSE"},
    ),
    Package(
        "preact",
        "10.29.8",
        "MIT",
        "ej2aVZ+vZ8WO7tvlQWRM9N63A0KzF9q4mWJfDUHgYaIofWY9hu74QdnQrjoPMmZi2/nZ5gN0bJCQF49xQqx09Q==",
        {
            "dist/preact.module.js": "preact.js",
            "hooks/dist/hooks.module.js": "hooks.js",
            "LICENSE": "preact.LICENSE",
        },
        # A browser resolves a bare name only by an inline import map, which the page's CSP forbids.
        {
            'from"preact"': 'from"./preact.js"',
            "\n//# sourceMappingURL=preact.module.js.map": "",
            "\n//# sourceMappingURL=hooks.module.js.map": "",
        },
    ),
    Package(
        "htm",
        "3.1.1",
        "Apache-2.0",
        "983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        {"dist/htm.module.js": "htm.js", "LICENSE": "htm.LICENSE"},
    ),
)
TESTS = (
    Package(
        "axe-core",
        "4.14.1",
        "MPL-2.0",
        "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
        {"axe.min.js": "axe.js", "LICENSE": "axe.LICENSE"},
    ),
)


def fetched(package: Package) -> dict[str, bytes]:
    """Our name -> content. The archive's hash must be as written above."""
    archive = httpx.get(package.url, timeout=TIMEOUT_S, follow_redirects=True).raise_for_status().content
    found = base64.b64encode(hashlib.sha512(archive).digest()).decode()
    if found != package.sha512:
        raise SystemExit(f"{package.url}: its SHA-512 is {found}, not {package.sha512}")
    files = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        for theirs, ours in package.files.items():
            member = opened.extractfile(f"package/{theirs}")
            if member is None:
                raise SystemExit(f"{package.name} {package.version} has no file {theirs}")
            text = member.read().decode()
            for old, new in package.rewrites.items():
                text = text.replace(old, new)
            files[ours] = text.encode()
    return files


def manifest(packages: tuple[Package, ...], files: Mapping[str, bytes]) -> bytes:
    """For each package: name, version, licence, source, and the SHA-256 of each file as we ship it."""
    return (
        json.dumps(
            [
                {
                    "name": each.name,
                    "version": each.version,
                    "licence": each.licence,
                    "source": f"{REGISTRY}/{each.name}/-/{each.name}-{each.version}.tgz",
                    "sha512": each.sha512,
                    "changed": [old.strip() for old in each.rewrites],
                    "files": {ours: hashlib.sha256(files[ours]).hexdigest() for ours in each.files.values()},
                }
                for each in packages
            ],
            indent=2,
        )
        + "\n"
    ).encode()


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.vendor")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tests", type=Path, metavar="FOLDER")
    chosen = parser.parse_args(words)
    packages = TESTS if chosen.tests else PAGE
    files = {name: content for package in packages for name, content in fetched(package).items()}
    files["vendor.json"] = manifest(packages, files)
    folder = chosen.tests or VENDOR
    if chosen.check:
        other = [name for name, content in files.items() if (folder / name).read_bytes() != content]
        print(
            "\n".join(f"{folder / name} is not as the registry has it" for name in other) or "as the registry has them"
        )
        return 1 if other else 0
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
        print(f"{folder / name}: {len(content)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

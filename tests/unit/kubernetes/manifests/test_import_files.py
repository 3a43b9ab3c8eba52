"""Files of manifests: one graph, and other objects beside it."""

from __future__ import annotations

import pytest
import yaml

from dynamo_local.errors import BadInput, ConfigError
from dynamo_local.kubernetes.import_graph import read_documents
from tests.unit.kubernetes.manifests.carried import manifest, worker


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no DynamoGraphDeployment"),
        ("a: [", "line 1"),
        ("a: \x00", "not YAML"),
        ("- 1", "without `kind`"),
        ("kind: 5", "without `kind`"),
        ("kind: Service", "kinds Service"),
        ("kind: DynamoGraphDeployment", "apiVersion is None"),
        ("kind: DynamoGraphDeployment\napiVersion: nvidia.com/v9", "known are"),
        (manifest(worker()).replace("name: W", "name: 'a b'"), "components.0.name"),
        (manifest(worker(), worker() | {"name": "w"}), "unique"),
        (manifest(worker()) + "---\n" + manifest(worker()).replace("name: g", "name: h"), "say --name"),
        ("kind: DynamoGraphDeployment\na: 2026-01-01", "not what a manifest may hold"),
        ("kind: DynamoGraphDeployment\na: &a [*a]", "not what a manifest may hold"),
        ("[" * 3000, "not"),
    ],
)
def test_what_is_no_manifest_is_refused_in_one_line(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        read_documents(text, "test")
    assert isinstance(refused.value, BadInput)
    assert len(str(refused.value).splitlines()) == 1


def test_of_several_graphs_one_is_chosen_by_name_and_lists_are_opened() -> None:
    both = [yaml.safe_load(manifest(worker()).replace("name: g", f"name: {name}")) for name in ("g", "h")]
    text = yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": both})
    assert read_documents(text, "test", "h").graph.metadata.name == "h"
    with pytest.raises(ConfigError, match="no DynamoGraphDeployment 'x' in it, but g, h"):
        read_documents(text, "test", "x")

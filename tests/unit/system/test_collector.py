"""Tests what an entry point imports is neither looked through while it is made, nor later, nor at the end."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dynamo_local.system import collector


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_afterwards_as_it_was_before(*, was_on: bool) -> None:
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with contextlib.suppress(LookupError), collector.paused():
            assert not gc.isenabled()
            raise LookupError
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()


def _run(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def test_what_was_made_inside_is_not_looked_through_again() -> None:
    """In a process of its own: nothing brings frozen values back but `gc.unfreeze`, which would bring back all."""
    program = """
        import gc
        from dynamo_local.system import collector
        with collector.keeping():
            made = [[] for _ in range(5000)]
            assert gc.get_count()[0] >= 5000, "collected meanwhile"
        print(gc.get_freeze_count() > 5000, len(gc.get_objects()) < 1000, gc.isenabled())
    """
    assert _run(program) == ["True True True"]


def test_a_file_that_a_graph_left_open_is_written_when_python_ends(tmp_path: Path) -> None:
    program = f"""
        from dynamo_local.system import collector
        with collector.keeping():
            import dynamo_local.worker.process
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        with collector.paused():
            import a_graph
    """
    written = tmp_path / "written.txt"
    (tmp_path / "a_graph.py").write_text(
        f"notes = open({str(written)!r}, 'w')\nnotes.write('whole')\ndef more(): notes.write('more')\n"
    )
    assert _run(program) == []
    assert written.read_text() == "whole"


def test_while_a_process_serves_only_what_is_new_is_looked_through() -> None:
    program = """
        import gc
        from dynamo_local.system import collector
        loaded = [[] for _ in range(5000)]
        before = gc.get_threshold()
        with collector.serving():
            print(len(gc.get_objects()) < 1000, gc.get_threshold()[0] > before[0])
        print(len(gc.get_objects()) > 5000, gc.get_threshold() == before)
    """
    assert _run(program) == ["True True", "True True"]


def test_a_file_that_a_graph_left_open_is_written_when_its_process_has_served(tmp_path: Path) -> None:
    written = tmp_path / "written.txt"
    (tmp_path / "a_graph.py").write_text(
        f"notes = open({str(written)!r}, 'w')\nnotes.write('whole')\ndef more(): notes.write('more')\n"
    )
    program = f"""
        from dynamo_local.system import collector
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import a_graph
        with collector.serving():
            pass
    """
    assert _run(program) == []
    assert written.read_text() == "whole"

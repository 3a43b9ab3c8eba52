"""Shows what a person was told, and until when it is worth a note."""

from __future__ import annotations

from dynamo_local.core.notes import About, Note, noted


class Told(list[str]):
    """Every text. `notes` are those that a status would show, as long as no worker gets well and no time passes."""

    def __init__(self) -> None:
        super().__init__()
        self._notes: tuple[Note, ...] = ()

    def __call__(self, text: str, about: About = None) -> None:
        self.append(text)
        self._notes = noted(self._notes, text, about, 0.0)

    @property
    def notes(self) -> list[str]:
        return [note.text for note in self._notes]

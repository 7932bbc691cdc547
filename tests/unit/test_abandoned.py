"""An export that one thread gives up while another is about to give it its name: whole, or not there at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from hf_ptq.errors import RunError
from hf_ptq.export.destination import Destination
from hf_ptq.report import Report


@pytest.fixture(params=["made by a rename", "filled from inside"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A final path; an empty directory that is there stays, and is filled."""
    final = tmp_path / "out"
    if request.param == "filled from inside":
        final.mkdir()
    return final


def written(place: Path) -> Destination:
    """A destination with something in it, inside its block."""
    destination = Destination(place, False, Report(Console(quiet=True))).__enter__()
    (destination.directory / "config.json").write_text("{}")
    return destination


def test_what_is_abandoned_cannot_get_its_name(place: Path) -> None:
    destination = written(place)
    destination.abandon()
    with pytest.raises(RunError, match="cannot get its name"):
        destination.commit()
    assert not list(place.parent.rglob("config.json"))
    assert not list(place.parent.rglob("*.tmp"))


def test_what_has_its_name_is_not_taken_back(place: Path) -> None:
    destination = written(place)
    destination.commit()
    destination.abandon()
    assert (place / "config.json").is_file()

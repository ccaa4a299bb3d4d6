"""Pages: made when somebody asks; one that cannot be made ends no scrape."""

import os
from dataclasses import replace

import pytest
from populated import snapshot
from running import Running, only, wait_for

from gpuwatch.exposition import Exposition
from gpuwatch.pages import Pages, Shelf


class Counted(Exposition):
    """Counts the pages that were made."""

    made = 0

    def render(self, shown):
        self.made += 1
        return super().render(shown)


def test_a_page_is_made_once_and_only_if_it_is_asked_for():
    """Ticks that nobody asks for cost no page; a crowd of scrapers gets one."""
    exposition, shown = Counted(), snapshot(1)
    pages = [Pages(shown, exposition) for _ in range(3)]
    assert exposition.made == 0
    bodies = [pages[1].metrics.plain for _ in range(5)]
    assert exposition.made == 1
    assert len(set(map(id, bodies))) == 1
    assert b"gpuwatch_gpu_power_watts" in bodies[0]


class Broken(Exposition):
    """Fails for one node alone."""

    def render(self, shown):
        if shown.gpus_expected == 13:
            raise ZeroDivisionError("broken on purpose")
        return super().render(shown)


def test_the_last_page_that_could_be_made_is_given(caplog):
    """A bug is told once a minute, not at each scrape; with no page at all it is the answer."""
    shelf, exposition = Shelf(), Broken()
    about = {"realtime_ns": 0, "time_ns": 0, "sources": {}}
    bad = Pages(replace(snapshot(1), gpus_expected=13, about=about), exposition)
    shelf.newest = bad
    with pytest.raises(ZeroDivisionError):
        shelf.metrics()
    shelf.newest = Pages(snapshot(1), exposition)
    good = shelf.metrics()
    shelf.newest = bad
    assert [shelf.metrics() for _ in range(5)] == [good] * 5
    assert shelf.status() is bad.status
    assert len(caplog.records) == 1
    assert list(shelf.faults) == ["metrics: ZeroDivisionError('broken on purpose')"]


BREAK = """
import os
from gpuwatch.exposition import Exposition

render = Exposition.render


def broken(self, shown):
    if os.path.exists(os.environ["BREAK"]):
        raise ZeroDivisionError("broken on purpose")
    return render(self, shown)


Exposition.render = broken
"""


def test_a_scrape_outlives_a_page_that_cannot_be_made(tmp_path):
    """A real daemon serves the page before it, tells of it, and goes on once it can."""
    (tmp_path / "sitecustomize.py").write_text(BREAK)
    fault = tmp_path / "broken"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "BREAK": str(fault)}
    config = only("host") + "[recorder]\nfree_ratio = 0\n"
    with Running(
        tmp_path, "--source", "simulated", config=config, environment=environment
    ) as daemon:
        page = daemon.get("/metrics")
        assert page[0] == 200
        fault.touch()

        def stale():
            before = daemon.get("/metrics")
            return daemon.events("page_failed") and before == daemon.get("/metrics")

        wait_for(stale)
        assert daemon.log().count("cannot be made") == daemon.log().count("page_failed") == 1
        kept = daemon.get("/metrics")
        fault.unlink()
        wait_for(lambda: daemon.get("/metrics") != kept)

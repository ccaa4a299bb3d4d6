"""Pages: made when somebody asks."""

from populated import snapshot

from gpuwatch.exposition import Exposition
from gpuwatch.pages import Pages


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

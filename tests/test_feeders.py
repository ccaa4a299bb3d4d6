"""A counter that two rings have is drawn from the finer one."""

from gpuwatch.feeders import coarser
from gpuwatch.gpu_signals import NVLINK_RECEIVED, PCIE_RECEIVED, POWER
from gpuwatch.pm_signals import columns_of
from gpuwatch.signals import Column, Entity

GPU, OTHER = Entity("gpu", "0"), Entity("gpu", "1")


def test_the_ring_with_more_rows_has_the_counter():
    """Of each entity alone; gauges, and rings of the same period, stay as they are."""
    fine = (columns_of(GPU, "default"), 10**6)
    slow = [((Column(gpu, PCIE_RECEIVED), Column(gpu, POWER)), 10**9) for gpu in (GPU, OTHER)]
    assert coarser([slow[0], fine, slow[1], fine]) == [{0}, set(), set(), set()]
    links = ((Column(GPU, POWER), Column(GPU, NVLINK_RECEIVED)), 10**9)
    assert coarser([links, fine]) == [{1}, set()]
    assert coarser([slow[0], slow[0]]) == [set(), set()]

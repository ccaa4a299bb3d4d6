"""What the daemon hears of its siblings."""

from gpuwatch.siblings import SamplerChannels


def state(**errors):
    return {"sources": {"nvml_state": {"state": "on"}}, "errors": {"nvml_state": errors}}


def test_errors_of_all_children_add_up(tmp_path):
    """A new child counts from 0; also when it soon has as many errors as the one before."""
    channels = SamplerChannels(tmp_path)
    totals = []
    for generation, errors in (
        (1, {"timeout": 2}),
        (1, {"timeout": 3}),
        (2, {"timeout": 3}),
        (2, {"timeout": 3, "gpu_is_lost": 1}),
        (3, {}),
    ):
        channels._take_state(generation, state(**errors))
        totals.append(channels.total_errors("nvml_state"))
    assert totals == [
        {"timeout": 2},
        {"timeout": 3},
        {"timeout": 6},
        {"timeout": 6, "gpu_is_lost": 1},
        {"timeout": 6, "gpu_is_lost": 1},
    ]
    assert channels.total_errors("rdma") == {}

"""The alert engine: its states against a model, its sums against a recount, and restarts."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ticks import GPU, Rise, node, tick, window

from gpuwatch.alerts import TRANSITIONS, AlertEngine
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.rule import BUSY_REACH_NS, Rule, View
from gpuwatch.signals import HOST, Entity
from gpuwatch.store import Store
from gpuwatch.window import TICK_NS, Tick

BOOT = "boot-1"
FOR_TICKS = 4
HOLD_TICKS = 9  # 2.1 s: not a whole number of ticks, so restored wall times need no rounding
WINDOW_TICKS = 12


def make_rule(name="level", **changes):
    fields = {
        "name": name,
        "severity": "warning",
        "per": "gpu",
        "help": "The level is high.",
        "next_step": "Lower it.",
        "judge": lambda view: view.highest("level"),
        "limit": 1.0,
        "window_seconds": 3.0,
        "for_seconds": 1.0,
        "hold_seconds": 2.1,
    }
    return Rule(**(fields | changes))


class Feed:
    """Gives an engine one tick after another."""

    def __init__(self, engine, start_ns=None):
        self.engine = engine
        self.now_ns = monotonic_ns() - 3600 * SECOND_NS if start_ns is None else start_ns

    def __call__(self, *levels, entity=GPU):
        """Judge a tick per level: None is uncovered, "absent" an entity that is not there."""
        events = []
        for level in levels:
            columns = None if level == "absent" else {"level": level}
            events += self.engine.judge(tick(self.now_ns, columns, entity))
            self.now_ns += TICK_NS
        return [event.name for event in events]


def engine_of(*rules, store=None, boot=BOOT, overrides=None):
    return AlertEngine(rules, overrides or {}, store, boot)


def state(engine, name="level", entity=GPU):
    (found,) = [a for a in engine.alerts() if (a.rule, a.entity) == (name, entity)]
    return found.state


class Model:
    """What the rules above should say, counted in ticks."""

    def __init__(self, sticky):
        self.sticky = sticky
        self.run = 0  # judged ticks in breach, one after another
        self.firing = False
        self.age = 0  # ticks since it fires
        self.unproven = 0  # judged ticks that a restored alert still needs
        self.acknowledged = False
        self.unseen = False  # firing from before a restart, and nothing judged since

    @property
    def state(self):
        if self.firing:
            return "firing"
        return "pending" if self.run else "inactive"

    def step(self, breached):
        """Take a tick in; return the transition it makes."""
        self.age += 1
        if breached is None:
            return None
        self.unproven = max(0, self.unproven - 1)
        self.unseen = False
        if self.firing:
            kept = breached or self.age < HOLD_TICKS or self.unproven
            if kept or (self.sticky and not self.acknowledged):
                return None
            self.firing, self.run = False, 0
            return "resolved"
        self.run = self.run + 1 if breached else 0
        if self.run > FOR_TICKS:
            self.firing, self.age, self.acknowledged = True, 0, False
            return "firing"
        return "pending" if self.run == 1 else None

    def restart(self, same_boot):
        self.run = 0
        if self.sticky and not same_boot:
            ended, self.firing = self.firing, False
            return "resolved" if ended else None
        self.unproven = WINDOW_TICKS if self.firing else 0
        self.unseen = self.firing
        return None


class AlertMachine(RuleBasedStateMachine):
    """Ticks, restarts, reboots and acknowledgements in any order."""

    def __init__(self):
        super().__init__()
        self.rules = (make_rule("plain"), make_rule("kept", sticky=True))
        self.models = {"plain": Model(False), "kept": Model(True)}
        self.store = Store(None)
        self.boot = 1
        self.feed = Feed(engine_of(*self.rules, store=self.store, boot="1"))
        self.expected = Counter()
        self.owed = []

    @rule(level=st.sampled_from([0.0, 0.9, 1.0, 3.0, None, "absent"]), count=st.integers(1, 13))
    def ticks(self, level, count):
        for _ in range(count):
            events, self.owed = self.owed, []
            for name, model in self.models.items():
                breached = None if level in (None, "absent") else level >= 1.0
                reached = model.step(breached)
                if reached:
                    self.expected[name, reached] += 1
                    events.append(f"{name}_{reached}")
            assert self.feed(level) == events

    @rule(same_boot=st.booleans())
    def restart(self, same_boot):
        self.boot += not same_boot
        self.feed.engine = engine_of(*self.rules, store=self.store, boot=str(self.boot))
        self.expected = Counter()
        self.owed = []
        for name, model in self.models.items():
            reached = model.restart(same_boot)
            if reached:
                self.expected[name, reached] += 1
                self.owed.append(f"{name}_{reached}")

    @precondition(lambda self: any(model.firing for model in self.models.values()))
    @rule(entity=st.sampled_from([None, GPU]))
    def acknowledge(self, entity):
        kept = self.models["kept"]
        changed = {"kept"} if kept.firing and not kept.acknowledged else set()
        kept.acknowledged = True
        for name, model in self.models.items():
            if model.firing and model.unseen:
                model.firing = model.unseen = False
                changed.add(name)
                self.expected[name, "resolved"] += 1
                self.owed.append(f"{name}_resolved")
        assert self.feed.engine.acknowledge(entity) == len(changed)

    @invariant()
    def states_agree(self):
        known = {alert.rule: alert.state for alert in self.feed.engine.alerts()}
        for name, model in self.models.items():
            assert known.get(name, "inactive") == model.state
        assert +self.feed.engine.transitions == self.expected


AlertMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestAlertMachine = AlertMachine.TestCase


def test_fires_after_for_and_resolves_after_hold():
    """A breach held for `for_seconds` fires; the alert stays for `hold_seconds`, then resolves."""
    engine = engine_of(make_rule())
    feed = Feed(engine)
    assert feed(1) == ["level_pending"]
    assert feed(1, 1, 1) == []
    assert feed(1) == ["level_firing"]
    assert feed(*[0] * (HOLD_TICKS - 1)) == []
    assert state(engine) == "firing"
    assert feed(0) == ["level_resolved"]


def test_one_known_tick_without_breach_resets_pending():
    """A pending alert starts anew after one tick below the limit."""
    feed = Feed(engine_of(make_rule()))
    assert feed(1, 1, 1, 1, 0, 1, 1, 1, 1) == ["level_pending", "level_pending"]
    assert feed(1) == ["level_firing"]


def test_unknown_time_does_not_count_towards_for():
    """Time without data neither fires nor clears a pending alert."""
    engine = engine_of(make_rule())
    feed = Feed(engine)
    feed(1, 1)
    assert feed(*[None] * 100, *["absent"] * 100) == []
    assert state(engine) == "pending"
    assert feed(1, 1, 1) == ["level_firing"]


def test_a_judge_that_says_nan_knows_nothing():
    """NaN is unknown, not a value below the limit."""
    engine = engine_of(make_rule(for_seconds=0, judge=lambda view: view.window("level").last))
    feed = Feed(engine)
    assert feed(1) == ["level_firing"]
    assert feed(*[None] * 50) == []
    assert state(engine) == "firing"


def test_a_vanished_gpu_keeps_its_answer():
    """An entity once seen stays listed, with its state, its last value and a word about it."""
    engine = engine_of(make_rule(for_seconds=0))
    feed = Feed(engine)
    feed(2)
    feed(*["absent"] * 50)
    (alert,) = engine.alerts()
    assert (alert.state, alert.value) == ("firing", 2)
    assert "no data" in alert.detail


def test_every_rule_and_entity_is_answered_from_the_first_tick():
    """Inactive alerts are listed for each known entity of the rule's kind, the host's at once."""
    engine = engine_of(make_rule(), make_rule("whole", per="host"))
    assert [(a.rule, a.entity) for a in engine.alerts()] == [("whole", HOST)]
    made = Tick(0, TICK_NS)
    for entity in (GPU, Entity("gpu", "1"), Entity("source", "nvml_state")):
        made.windows[entity] = {}
    assert engine.judge(made) == []
    answered = {(a.rule, str(a.entity), a.state, a.value) for a in engine.alerts()}
    assert answered == {
        ("whole", "host", "inactive", None),
        ("level", "gpu 0", "inactive", None),
        ("level", "gpu 1", "inactive", None),
    }
    assert engine.transitions == {(n, to): 0 for n in ("level", "whole") for to in TRANSITIONS}


def test_overrides_replace_numbers_and_switch_rules_off():
    """The config's numbers take the place of the rule's; a rule that is off is not there."""
    engine = engine_of(
        make_rule(),
        make_rule("other"),
        overrides={"level": {"limit": 5.0, "for_seconds": 0.0}, "other": {"enabled": False}},
    )
    feed = Feed(engine)
    assert feed(4.9) == []
    assert feed(5) == ["level_firing"]
    assert [a.rule for a in engine.alerts()] == ["level"]
    assert engine.alerts()[0].limit == 5.0


def test_at_most_breaches_at_the_limit_and_below():
    """With `at_most` low values are the fault."""
    feed = Feed(engine_of(make_rule(at_most=True, limit=0.0, for_seconds=0)))
    assert feed(1, 0.5) == []
    assert feed(0) == ["level_firing"]


def test_the_published_value_may_be_another_than_the_judged_one():
    """`show` gives the alert's value, the judge decides."""
    engine = engine_of(make_rule(for_seconds=0, show=lambda view: 0.25))
    Feed(engine)(1)
    assert (engine.alerts()[0].state, engine.alerts()[0].value) == ("firing", 0.25)


def test_detection_tells_each_sight_once():
    """A detected event comes with the first tick of a sight, again after ten seconds without."""
    engine = engine_of(make_rule(for_seconds=60, detect=lambda view: view.active("level")))
    feed = Feed(engine)
    assert feed(1) == ["level_detected", "level_pending"]
    assert feed(0, 1, 0, 0, 1).count("level_detected") == 0
    assert feed(*[0] * 40) == []
    assert feed(1) == ["level_detected", "level_pending"]
    assert engine.detections == {"level": 2}


def test_a_rule_that_asks_for_recordings_stirs():
    """In the tick in which it is detected, goes pending or fires, and in no other."""
    engine = engine_of(
        make_rule(record=True),
        make_rule("seen", limit=9.0, record=True, detect=lambda view: view.highest("level") == 0.5),
        make_rule("quiet"),
    )
    feed, stirred = Feed(engine), []
    for level in (0.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0):
        feed(level)
        stirred.append(engine.stirred)
    assert stirred == [False, True, False, True, False, False, False, True, False]
    other = Feed(engine_of(make_rule()))
    other(1.0)
    assert not other.engine.stirred


def test_sticky_needs_recovery_and_acknowledgement_in_any_order():
    """A sticky alert outlasts its recovery until acknowledged, and its acknowledgement until it."""
    engine = engine_of(make_rule(sticky=True, for_seconds=0))
    feed = Feed(engine)
    feed(1, *[0] * 100)
    assert state(engine) == "firing"
    assert "acknowledged" in engine.alerts()[0].detail
    assert engine.acknowledge(Entity("gpu", "7")) == 0
    assert engine.acknowledge(GPU) == 1
    assert feed(0) == ["level_resolved"]
    assert feed(1) == ["level_firing"]
    assert engine.acknowledge() == 1
    assert feed(*[1] * 100) == []
    assert feed(0) == ["level_resolved"]


def test_data_time_that_goes_back_loses_nothing():
    """A recording that begins again carries the states over and resolves by the hold."""
    engine = engine_of(make_rule(for_seconds=0))
    feed = Feed(engine, start_ns=10**15)
    feed(1)
    feed.now_ns = 0
    assert feed(*[0] * HOLD_TICKS) == []
    assert feed(0) == ["level_resolved"]


columns = st.fixed_dictionaries(
    {
        "bit": st.sampled_from([0.0, 1.0, None]),
        "gpu_utilization_ratio": st.sampled_from([0.0, 0.2, 0.21, 1.0, None]),
        "covered_ns": st.integers(0, TICK_NS),
    }
)
steps = st.lists(
    st.tuples(
        st.sampled_from([1, 1, 1, 1, 1, 2, 30, 20_000, -3, -100]),  # ticks to the next one
        st.one_of(st.none(), columns),
    ),
    max_size=60,
)


@given(steps)
@settings(deadline=None)
def test_sums_agree_with_a_recount(script):
    """Share, busy share and mean equal a recount of the ticks kept, over gaps and going back."""
    view = View(make_rule(window_seconds=1.0), GPU)
    span = SECOND_NS
    near, busy_ticks = [], []  # (end_ns, window), what fell out before going back stays out
    now = 0
    for jump, cells in script:
        now += jump * TICK_NS
        made = Tick(now - TICK_NS, now)
        bit, busy = None, False
        if cells is not None:
            covered = cells["covered_ns"]
            bit = window(now - TICK_NS, now, cells["bit"], covered)
            usage = cells["gpu_utilization_ratio"]
            busy = usage is not None and usage > 0.2
            made.windows[GPU] = {
                "bit": bit,
                "gpu_utilization_ratio": window(now - TICK_NS, now, usage),
            }
        near = [row for row in near if now - span < row[0] < now]
        busy_ticks = [row for row in busy_ticks if now - BUSY_REACH_NS < row[0] < now]
        if bit is not None:
            near.append((now, bit))
        if bit is not None and busy:
            busy_ticks = [*busy_ticks, (now, bit)][-(span // TICK_NS) :]
        view.look(made)
        answers = view.share("bit"), view.busy_share("bit"), view.mean("bit")
        if bit is None:
            assert answers == (None, None, None)
            continue
        active = sum(int(one.integral) for _, one in near)
        covered = sum(one.covered_ns for _, one in near)
        latest = sum(int(one.integral) for _, one in busy_ticks)
        assert answers == (active / span, latest / span, active / covered if covered else None)


def test_share_counts_uncovered_time_as_not_active():
    """The share is of the whole window, from the first tick on."""
    view = View(make_rule(window_seconds=1.0), GPU)
    shares = []
    for index, value in enumerate([1.0, 1.0, None, 1.0, 1.0, 1.0, 1.0]):
        view.look(tick(index * TICK_NS, {"bit": value}))
        shares.append(view.share("bit"))
    assert shares == [0.25, 0.5, 0.5, 0.75, 0.75, 0.75, 1.0]


def counted(start_ns, increase, covered_ns=TICK_NS):
    """Return a tick in which a counter rose; None is a tick without the counter."""
    made = Tick(start_ns, start_ns + TICK_NS)
    if increase is not None:
        shown = window(start_ns, made.end_ns, 1.0, covered_ns)
        made.windows[GPU] = {"errors_total": replace(shown, increase=increase)}
    return made


def test_rise_is_the_increase_over_the_window():
    """A rise leaves the window as it came, to the last bit, also in fractions of the unit."""
    view = View(make_rule(window_seconds=1.0), GPU)
    rises = []
    for index, increase in enumerate([3.0, 0.1, 0.2, 0.0, 0.3, 4e12, 0.0, 0.0, 0.0, 0.0]):
        view.look(counted(index * TICK_NS, increase))
        rises.append(view.rise("errors_total"))
    big = 4e12
    assert rises == [3.0, 3.1, 3.3, 3.3, 0.6, big + 0.5, big + 0.3, big + 0.3, big, 0.0]


def test_rise_is_unknown_while_the_counter_is():
    """No counter, and none read within the window, is no rise of 0."""
    view = View(make_rule(window_seconds=1.0), GPU)
    rises = []
    script = [(None, 0), (0.0, 0), (5.0, TICK_NS), (0.0, 0), (None, 0), (0.0, 0), (0.0, 0)]
    for index, (increase, covered_ns) in enumerate(script):
        view.look(counted(index * TICK_NS, increase, covered_ns))
        rises.append(view.rise("errors_total"))
    assert rises == [None, None, 5.0, 5.0, None, 5.0, None]


def test_rise_adds_several_counters_up():
    """Those that are not known add nothing; None is known if none of them is."""
    view = View(make_rule(window_seconds=1.0), GPU)
    rises = []
    for index, columns in enumerate([{}, {"a": Rise(1.0)}, {"a": Rise(1.0), "b": Rise(2.5)}, {}]):
        view.look(tick(index * TICK_NS, columns))
        rises.append(view.rise("a", "b"))
    assert rises == [None, 1.0, 4.5, None]


def test_columns_of_a_signal_are_found_by_its_name():
    """Every label value of the signal, and no signal whose name only begins alike."""
    view = View(make_rule(), GPU)
    view.look(tick(0, {'a{x="1"}': 1.0, 'a{x="2"}': None, 'a_b{x="1"}': 1.0, "a": 1.0}))
    assert view.columns("a") == ['a{x="1"}', 'a{x="2"}']
    view.look(tick(TICK_NS, None))
    assert view.columns("a") == []


def test_siblings_are_measured_in_the_same_tick_before_any_is_judged():
    """Each GPU sees what all others measure now, also one that has just come or has gone."""
    seen = []

    def judge(view):
        seen.append([other.measured for other in view.siblings])

    engine = engine_of(make_rule(measure=lambda view: view.highest("level"), judge=judge))
    other = Entity("gpu", "1")
    engine.judge(node(0, {GPU: {"level": 1.0}}))
    engine.judge(node(TICK_NS, {GPU: {"level": 2.0}, other: {"level": 3.0}}))
    engine.judge(node(2 * TICK_NS, {other: {"level": 4.0}}))
    assert seen == [[1.0], [2.0, 3.0], [2.0, 3.0], [None, 4.0], [None, 4.0]]


def test_busy_share_is_of_the_latest_busy_time():
    """Busy ticks fill the window and push out the oldest; idle ones neither count nor push."""
    view = View(make_rule(window_seconds=1.0), GPU)
    shares = []
    script = [(1, 1), (1, 0), (1, 1), (1, 1), (1, 1), (1, 1), (0, 0), (0, 1), (0, 1)]
    for index, (bit, usage) in enumerate(script):
        cells = {"bit": float(bit), "gpu_utilization_ratio": float(usage)}
        view.look(tick(index * TICK_NS, cells))
        shares.append(view.busy_share("bit"))
    assert shares == [0.25, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.75, 0.5]


def test_busy_prefers_sm_activity():
    """SM activity decides where it is known, else utilization; exactly a fifth is not busy."""
    view = View(make_rule(), GPU)
    for cells, busy in [
        ({"gpu_sm_active_ratio": 0.1, "gpu_utilization_ratio": 1.0}, False),
        ({"gpu_sm_active_ratio": 0.3, "gpu_utilization_ratio": 0.0}, True),
        ({"gpu_sm_active_ratio": None, "gpu_utilization_ratio": 1.0}, True),
        ({"gpu_utilization_ratio": 0.2}, False),
        ({}, False),
    ]:
        view.look(tick(0, cells))
        assert view.busy is busy


levels = st.lists(st.sampled_from([0.0, 1.0, 2.0, None, "absent"]), max_size=120)


@given(levels)
@settings(deadline=None)
def test_the_same_ticks_give_the_same_alerts(script):
    """Judging the same ticks twice gives identical events, alerts and counts."""
    rules = (
        make_rule(detect=lambda view: view.active("level")),
        make_rule("mean", judge=lambda view: view.mean("level"), for_seconds=0.5),
    )
    outcomes = []
    for _ in range(2):
        engine = engine_of(*rules)
        events = Feed(engine, start_ns=0)(*script)
        outcomes.append((events, engine.alerts(), engine.transitions, engine.detections))
    assert outcomes[0] == outcomes[1]


@pytest.fixture
def life(tmp_path):
    """Return a function that starts the engine's next life with what the file holds."""
    stores = []

    def begin(*rules, boot=BOOT, overrides=None):
        if stores:
            stores.pop().close()
        stores.append(Store(tmp_path / "gpuwatch.sqlite"))
        assert stores[0].fault == ""
        return engine_of(*rules, store=stores[0], boot=boot, overrides=overrides)

    yield begin
    stores.pop().close()


def test_a_firing_alert_is_firing_at_once_after_a_restart(life):
    """State, value, start and recording survive in the file."""
    level = make_rule(for_seconds=0)
    engine = life(level)
    Feed(engine)(2)
    engine.set_recording("level", GPU, "level-1.gwr")
    (before,) = engine.alerts()
    (after,) = life(level).alerts()
    assert (after.state, after.value, after.recording) == ("firing", 2, "level-1.gwr")
    assert abs(after.since_ns - before.since_ns) < SECOND_NS


def test_a_restored_alert_resolves_after_one_whole_window(life):
    """The hold may be long over: only a full window of data without breach ends it."""
    level = make_rule(for_seconds=0)
    feed = Feed(life(level))
    feed(2)
    feed.engine = life(level)
    feed.now_ns = monotonic_ns()
    assert feed(*[None] * 100, *[0] * (WINDOW_TICKS - 1)) == []
    assert feed(0) == ["level_resolved"]
    assert life(level).alerts() == []


def test_a_restored_busy_alert_waits_for_busy_time(life):
    """Idle time proves nothing about a rule for busy time, until its hour is over."""
    level = make_rule(for_seconds=0, limit=0.01, judge=lambda view: view.busy_share("bit"))
    start = monotonic_ns() - 2 * BUSY_REACH_NS
    life(level).judge(tick(start, {"bit": 1.0, "gpu_utilization_ratio": 1.0}))

    def judged(usage, count, length_ns=TICK_NS):
        engine = life(level)
        cells = {"bit": 0.0, "gpu_utilization_ratio": usage}
        for index in range(count):
            at = start + 60 * SECOND_NS + index * length_ns
            engine.judge(tick(at, cells, length_ns=length_ns))
        return state(engine)

    assert judged(0.0, 10 * WINDOW_TICKS) == "firing"
    assert judged(1.0, WINDOW_TICKS - 1) == "firing"
    assert judged(0.0, 3599, SECOND_NS) == "firing"
    assert judged(0.0, 3600, SECOND_NS) == "inactive"


def test_busy_time_without_breach_ends_a_restored_busy_alert(life):
    """A whole window of busy time is enough."""
    level = make_rule(for_seconds=0, limit=1.0)
    busy = make_rule("busy", for_seconds=0, limit=0.01, judge=lambda view: view.busy_share("level"))
    feed = Feed(life(level, busy))
    cells = {"level": 1.0, "gpu_utilization_ratio": 1.0}
    feed.engine.judge(tick(feed.now_ns, cells))
    engine = life(level, busy)
    for index in range(1, WINDOW_TICKS + 1):
        assert state(engine, "busy") == "firing"
        engine.judge(tick(feed.now_ns + index * TICK_NS, cells | {"level": 0.0}))
    assert state(engine, "busy") == "inactive"


def test_another_boot_clears_sticky_alerts_only(life):
    """A reboot ends a sticky alert, and says so; an ordinary one must see a window first."""
    rules = (make_rule(for_seconds=0), make_rule("kept", sticky=True, for_seconds=0))
    feed = Feed(life(*rules))
    feed(2)
    assert state(life(*rules), "kept") == "firing"
    feed.engine = engine = life(*rules, boot="boot-2")
    assert (state(engine), state(engine, "kept")) == ("firing", "inactive")
    assert feed(0) == ["kept_resolved"]
    assert engine.transitions["kept", "resolved"] == 1
    assert state(life(*rules), "kept") == "inactive"


def test_an_acknowledgement_survives_a_restart(life):
    """Acknowledged before the restart, resolved after the recovery."""
    level = make_rule(sticky=True, for_seconds=0)
    feed = Feed(life(level))
    feed(1)
    feed.engine.acknowledge()
    feed.engine = life(level)
    assert feed(*[0] * WINDOW_TICKS) == ["level_resolved"]


def test_a_pending_alert_begins_anew_after_a_restart(life):
    """What was pending has no timer that could be trusted."""
    feed = Feed(life(make_rule()))
    assert feed(1) == ["level_pending"]
    feed.engine = life(make_rule())
    assert feed(1) == ["level_pending"]


def test_a_rule_switched_off_does_not_come_back_firing(life):
    """An alert of a rule that is off is gone when the rule is on again."""
    level = make_rule(for_seconds=0)
    Feed(life(level))(1)
    assert state(life(level)) == "firing"
    assert life(level, overrides={"level": {"enabled": False}}).alerts() == []
    assert life(level).alerts() == []


def test_an_alert_older_than_the_machines_start_has_a_negative_start(life):
    """`since_ns` of an alert from an earlier boot lies before the monotonic clock's zero."""
    level = make_rule(for_seconds=0)
    Feed(life(level), start_ns=-5 * SECOND_NS)(2)
    (alert,) = life(level, boot="boot-2").alerts()
    assert alert.state == "firing"
    assert alert.since_ns < 0

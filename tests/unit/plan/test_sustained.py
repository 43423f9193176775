"""Learning what paths sustain, on simulated devices that are honest or give bursts."""

import pytest

from mlp_offload.plan.sustained import LONGEST_WAIT, Sample, SustainedRates


class Device:
    """Sustains ``rate``; with ``burst`` it shows that many times as much as long as a step asks less than it sustains."""

    def __init__(self, rate, burst=1.0):
        self.rate, self.burst = rate, burst

    def sample(self, nbytes, seconds):
        busy = nbytes / self.rate
        if busy < 0.97 * seconds:
            busy /= self.burst
        return Sample(nbytes / busy, busy / seconds)


class Run:
    """Steps with shares in proportion to ``rates``: written in one step, and read in the next."""

    def __init__(self, known, devices):
        self.rates, self.devices = SustainedRates(known), devices
        self.stored = self._shares()

    def _shares(self):
        known = self.rates.values
        return [1000.0 * rate / sum(known) for rate in known]

    def step(self):
        """Efficiency of one step, 0 to 1."""
        reads, writes = self.stored, self._shares()
        seconds = max(max(r, w) / device.rate for r, w, device in zip(reads, writes, self.devices))
        both = [[d.sample(n, seconds) for n in pair] for d, *pair in zip(self.devices, reads, writes)]
        self.rates.observe([Sample(min(s.rate for s in pair), max(s.load for s in pair)) for pair in both])
        self.stored = writes
        return 1000.0 / sum(device.rate for device in self.devices) / seconds


@pytest.mark.parametrize(("burst", "steps"), [(1.0, 3), (4.0, 5)])
def test_a_path_that_halves_and_doubles_is_followed_within_a_few_steps(burst, steps):
    devices = [Device(400, burst), Device(200, burst)]
    run = Run([400, 200], devices)
    assert all(run.step() > 0.99 for _ in range(5))
    for rate in (200, 400, 200, 400, 800, 400):
        devices[0].rate = rate
        efficiencies = [run.step() for _ in range(10)]
        first = next(i for i, efficiency in enumerate(efficiencies) if efficiency > 0.9)
        assert first + 1 <= steps, efficiencies
        after = efficiencies[first:]
        assert min(after) > 0.7 and sum(after) / len(after) > 0.9, efficiencies


def test_bursts_do_not_make_the_shares_swing():
    """Begun with wrong rates: tries become rare, and the efficiency of most steps is that of the right shares."""
    run = Run([300, 300, 300], [Device(400, 5.0), Device(200, 3.0), Device(900, 2.0)])
    efficiencies = [run.step() for _ in range(200)]
    assert sum(efficiency > 0.95 for efficiency in efficiencies[10:]) > 0.9 * len(efficiencies[10:])


def test_a_path_that_never_keeps_up_is_tried_ever_more_rarely():
    rates = SustainedRates([100.0, 100.0])
    tried = []
    for number in range(400):
        before = rates.values[0]
        keeps_up = before <= 100
        # path 1 holds the step up; path 0 seems to have time left, and gives 100 when it is asked for more
        rates.observe([Sample(500, 0.3) if keeps_up else Sample(100, 1.0), Sample(100, 1.0)])
        if rates.values[0] > 1.2 * before:
            tried.append(number)
    gaps = [b - a for a, b in zip(tried, tried[1:])]
    assert gaps == sorted(gaps) and gaps[-1] >= LONGEST_WAIT and len(tried) < 20


def test_nothing_is_tried_when_no_other_path_holds_the_step_up():
    rates = SustainedRates([100.0, 50.0])
    rates.observe([Sample(400, 0.2), Sample(400, 0.1)])  # the processor was slow: more for a path shortens nothing
    assert rates.values == [100, 50]


def test_what_is_not_known_is_taken_from_the_first_step():
    rates = SustainedRates([None, 7.0])
    rates.observe([Sample(3.0, 0.1), None])
    assert rates.values == [3.0, 7.0]

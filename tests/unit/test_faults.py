"""Every planted fault shows in the logprobs, differs from every other one, and leaves the model exactly as it was."""

import itertools
import math

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st
from safetensors.torch import load_file

from helpers.checkpoints import save_weights, write_tiny_checkpoint
from helpers.faults import (
    FAULTS,
    Fault,
    _minimum,
    fit_temperature,
    fitting_faults,
    load_reference,
    logprobs,
    rank_faults,
    shifted_fits,
    stale_faults,
    temperature,
)
from helpers.profiles import load_profile

LEAST = 1e-3  # nats that a fault must change somewhere; sound engines in float32 agree to 1e-5
# pairs that compute the same thing; none is known. Whoever adds a fault that no logprob can tell from another lists it
EQUIVALENT: set[frozenset[str]] = set()


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(folders):
    return load_reference(folders[0])


@pytest.fixture(scope="module")
def sequences(model):
    w, generator = model.config.sliding_window, torch.Generator().manual_seed(0)
    return [torch.randint(1, 64, (n,), generator=generator).tolist() for n in (w, 3 * w)]


@pytest.fixture(scope="module")
def sound(model, sequences):
    return logprobs(model, sequences)


@pytest.fixture(scope="module")
def everything(folders):
    return {**FAULTS, **stale_faults(folders[1])}


STALE = sorted(stale_faults("nowhere"))


@pytest.mark.parametrize("name", [*FAULTS, *STALE])
def test_a_planted_fault_shows_and_is_taken_out_exactly(name, everything, model, sequences, sound):
    state = {n: t.clone() for n, t in model.state_dict().items()}
    config = model.config.to_dict()
    with everything[name].plant(model):
        changed = (logprobs(model, sequences) - sound).abs().max()
    assert changed > LEAST
    assert torch.equal(logprobs(model, sequences), sound)
    assert model.config.to_dict() == config
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())


def test_no_two_faults_look_alike(everything, model, sequences):
    planted = {}
    for name, fault in everything.items():
        with fault.plant(model):
            planted[name] = logprobs(model, sequences)
    alike = {
        frozenset((a, b))
        for a, b in itertools.combinations(planted, 2)
        if (planted[a] - planted[b]).abs().max() < LEAST
    }
    assert alike == EQUIVALENT


@pytest.mark.parametrize("name", [n for n, f in FAULTS.items() if f.weights])
def test_a_weight_fault_is_the_same_as_a_checkpoint_with_those_weights(
    name, folders, model, sequences, tmp_path
):
    with FAULTS[name].plant(model):
        planted = logprobs(model, sequences)
        weights = {n: t.clone() for n, t in model.state_dict().items()}
    broken = load_reference(save_weights(weights, folders[0], tmp_path / "broken"))
    assert torch.equal(logprobs(broken, sequences), planted)


def test_the_others_are_no_matter_of_weights(model, folders):
    """kv-heads-in-turn changes shapes: no checkpoint of this config has its effect."""
    shapes = {n: t.shape for n, t in model.state_dict().items()}
    for name, fault in FAULTS.items():
        if not fault.weights and name != "kv-heads-in-turn":
            with fault.plant(model):
                assert {n: t.shape for n, t in model.state_dict().items()} == shapes
                state = load_file(folders[0] / "model.safetensors")
                assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items()), name


def test_a_fault_is_taken_out_after_an_error_too(model, sequences, sound):
    for fault in FAULTS.values():
        with pytest.raises(ZeroDivisionError), fault.plant(model):
            _ = 1 / 0
    assert torch.equal(logprobs(model, sequences), sound)


def test_two_faults_can_be_planted_at_once(model, sequences, sound):
    one, two = FAULTS["yarn-missing"], FAULTS["sinks-ignored"]
    with one.plant(model):
        alone = logprobs(model, sequences)
        with two.plant(model):
            both = logprobs(model, sequences)
        assert torch.equal(logprobs(model, sequences), alone)
    assert (both - alone).abs().max() > LEAST
    assert torch.equal(logprobs(model, sequences), sound)


@pytest.mark.parametrize(
    "change, names",
    [
        ({"model.intermediate_size": 128}, {"down-proj-transposed"}),
        ({"model.sliding_window": 1}, {"window-one-short"}),
        ({"model.num_hidden_layers": 1}, {"window-on-odd-layers"}),
        ({"model.num_key_value_heads": 1}, {"kv-heads-in-turn", "qkv-split-flat"}),
        ({"model.num_key_value_heads": 4}, {"kv-heads-in-turn"}),
        ({"model.num_experts_per_tok": 4}, {"router-softmax-first"}),
    ],
)
def test_what_cannot_occur_says_why(change, names, tmp_path):
    change = {"model.intermediate_size": 64, **change}
    other = load_reference(write_tiny_checkpoint(load_profile("cpu", **change), tmp_path / "other"))
    assert set(FAULTS) - set(fitting_faults(other.config)) == names
    for name in names:
        with pytest.raises(ValueError, match=f"fault {name} cannot be planted in this model: .+"):
            with FAULTS[name].plant(other):
                pass


def test_yarn_faults_need_yarn(model):
    rope = model.config.rope_parameters
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 150000.0}
    try:
        fitting = fitting_faults(model.config)
    finally:
        model.config.rope_parameters = rope
    assert {n for n in FAULTS if n not in fitting} == {
        "yarn-missing",
        "yarn-bounds-rounded",
        "yarn-factor-missing",
    }


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_says_what_why_and_what_to_do(name):
    fault = FAULTS[name]
    assert fault.name == name and name == name.lower()
    assert all(len(text) > 10 for text in (fault.what, fault.cause, fault.cure)) and fault.references


def test_the_window_faults_are_invisible_within_the_window(model):
    """What a short comparison cannot show: no sequence is longer than the window less one."""
    short = [list(range(1, model.config.sliding_window))]
    sound = logprobs(model, short)
    for name in ("window-one-short", "window-one-long", "window-missing", "window-on-odd-layers"):
        with FAULTS[name].plant(model):
            assert torch.equal(logprobs(model, short), sound), name


def test_sound_numbers_come_first_and_without_a_gap(model, sequences, sound):
    first, *rest = rank_faults(model, sequences, sound)
    assert first.fault is None and first.worst == first.mean == first.effect == 0
    assert len(rest) == len(FAULTS) and all(fit.mean > 0 for fit in rest if fit.fault.name != "temperature")


def test_masked_tokens_do_not_count(model, sequences, sound):
    given = sound.clone()
    given[3:9] = float("nan")
    assert rank_faults(model, sequences, given, {})[0].worst == 0
    given[9] += 0.25
    assert rank_faults(model, sequences, given, {})[0].worst == pytest.approx(0.25)


@pytest.mark.parametrize("value", [0.3, 0.7, 1.0, 1.4])
def test_the_temperature_is_found(value, model, sequences):
    given = logprobs(model, sequences, value)
    assert fit_temperature(model, sequences, given) == pytest.approx(value, rel=1e-4)
    with temperature(value).plant(model):
        assert (logprobs(model, sequences) - given).abs().max() < 1e-5


def test_the_temperature_stays_within_its_bounds(model, sequences, sound):
    """Flat logprobs ask for an infinite temperature."""
    flat = torch.full_like(sound, -math.log(64))
    assert fit_temperature(model, sequences, flat) == pytest.approx(10, rel=0.2)
    assert fit_temperature(model, sequences, flat) <= 10 * (1 + 1e-12)


@drawn(st.floats(-5, 5), st.floats(0.01, 5), st.floats(-20, 20))
def test_a_minimum_lies_within_its_bounds(low, width, target):
    best = _minimum(lambda x: abs(x - target), low, low + width)
    assert low <= best <= low + width
    assert best == pytest.approx(min(max(target, low), low + width), abs=1e-4)


@pytest.mark.parametrize("broken", ["first", "middle", "last"])
def test_a_fault_whose_numbers_are_nan_comes_last(broken, model, sequences, sound):
    def nan(model):
        yield model.lm_head.weight, "data", model.lm_head.weight.data * math.nan

    nans = Fault("nan", "", "", "", "", nan)
    names = {"first": ["nan", "b", "a"], "middle": ["b", "nan", "a"], "last": ["b", "a", "nan"]}[broken]
    faults = {"a": FAULTS["sinks-ignored"], "b": FAULTS["gate-up-halves"], "nan": nans}
    with faults["a"].plant(model):
        given = logprobs(model, sequences)
    ranked = rank_faults(model, sequences, given, {name: faults[name] for name in names})[1:]
    assert [fit.fault.name for fit in ranked] == ["sinks-ignored", "gate-up-halves", "nan"]


@pytest.mark.parametrize("offset", [1, -1])
def test_a_shift_by_one_is_found_in_either_direction(offset, sequences, sound):
    lengths = [len(tokens) - 1 for tokens in sequences]
    given = torch.cat([part.roll(-offset) for part in sound.split(lengths)])  # the edges hold what is wrong
    exact = {fit.fault.what: fit.worst for fit in shifted_fits(sequences, given, sound)}
    assert len(exact) == 2 and exact.pop(f"logprobs[t] is log p(tokens[t{offset:+d}] | before)") == 0
    assert min(exact.values()) > LEAST


def test_a_shift_is_not_told_from_too_few_tokens():
    """Of two tokens one logprob counts, and no shifted one does."""
    pair = torch.tensor([-1.0, -2.0])
    assert shifted_fits([[1, 2], [3, 4]], pair, pair) == []


def test_an_mxfp4_checkpoint_has_a_reference_in_float32(folders, tmp_path, sequences):
    from helpers.mxfp4 import write_mxfp4_checkpoint

    quantised = load_reference(write_mxfp4_checkpoint(folders[0], tmp_path / "mxfp4"))
    assert {p.dtype for p in quantised.parameters()} == {torch.float32}
    assert logprobs(quantised, sequences).isfinite().all()

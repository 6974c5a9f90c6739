"""Layouts that add up, memory by hand and as recorded, refusals, predictions beside recorded runs."""

import csv
import dataclasses
import doctest
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers import calibration, memory, planner
from helpers.anatomy import GPT_OSS_20B, GPT_OSS_120B, total_parameters
from helpers.layout import REASONS, Layout, impossible, rank_parameters
from helpers.planner import COLOCATED, OFFLOADED, PLACEMENTS, SPLIT, Cluster, make_plan, search, work_of
from helpers.profiles import PROJECT_ROOT, load_profile

FROZEN, FULL = load_profile("gpu-20b"), load_profile("cluster")
H200, H100 = planner.cards()["h200"], planner.cards()["h100"]
power = st.sampled_from([1, 2, 4, 8])


def test_doctests():
    assert doctest.testmod(calibration).failed == 0


# --- layouts ----------------------------------------------------------------------------------------------------------
@given(
    tensor=power,
    pipeline=power,
    expert=st.sampled_from([1, 2, 4, 8, 16, 32]),
    model=st.sampled_from([GPT_OSS_20B, GPT_OSS_120B]),
)
def test_the_ranks_of_a_replica_hold_the_model(tensor, pipeline, expert, model):
    """Each tensor counted once, whichever way the model is cut."""
    assume(model["num_hidden_layers"] % pipeline == 0)
    layout = Layout(tensor * pipeline * expert, tensor, pipeline, 1, expert)
    stages = [rank_parameters(model, layout, stage) for stage in range(pipeline)]
    assert sum(tensor * r.split + r.whole + expert * r.experts for r in stages) == total_parameters(model)


def test_parameters_of_a_rank_by_hand():
    whole = rank_parameters(GPT_OSS_20B, Layout())
    layer = 26_550_144 + 92_192 + 5_760  # attention with its sinks, router, norms
    assert (whole.total, whole.dense) == (20_914_757_184, 24 * layer + 2880 + 2 * 579_133_440)
    assert whole.dense == 1_797_824_064  # what gpu-20b trains
    ep8 = rank_parameters(GPT_OSS_20B, Layout(8, expert=8))
    assert ep8.experts == 24 * 32 * 24_891_840 // 8 and ep8.dense == whole.dense
    first, last = (rank_parameters(GPT_OSS_20B, Layout(2, pipeline=2), stage) for stage in (0, 1))
    assert last.total - first.total == 2880  # the final norm; embedding and head are equally large
    with pytest.raises(ValueError, match="no pipeline stage 2 of 2"):
        rank_parameters(GPT_OSS_20B, Layout(2, pipeline=2), 2)


def test_tied_embeddings_are_held_once_or_at_both_ends_of_a_pipeline():
    tied = {**GPT_OSS_20B, "tie_word_embeddings": True}
    assert rank_parameters(tied, Layout()).total == total_parameters(tied)
    ends = [rank_parameters(tied, Layout(2, pipeline=2), stage).total for stage in (0, 1)]
    assert sum(ends) == total_parameters(tied) + 201_088 * 2880


@pytest.mark.parametrize("ranks", [1, 2, 6, 8, 16])
def test_every_layout_that_is_not_refused_multiplies_to_the_world(ranks):
    """Both grids: of dense weights and of experts."""
    kept = [
        x
        for x in planner.layouts(ranks, FULL.model, wide=True)
        if impossible(FULL.model, x, 48 * 16, 1536) is None
    ]
    assert kept
    for x in kept:
        assert x.tensor * x.pipeline * x.context * x.data == ranks
        assert x.expert_tensor * x.expert * x.pipeline * x.expert_data == ranks
        assert x.distributed_optimizer == (x.data * x.context > 1 or x.expert_data > 1)


REACHED = {
    "expert tensors": (Layout(2, tensor=2, expert_tensor=2), "Megatron-LM 2383"),
    "query heads": (Layout(128, tensor=128), "64 query heads do not divide by 128"),
    "key-value heads": (Layout(16, tensor=16), "8 key-value heads do not divide by 16"),
    "layers": (Layout(5, pipeline=5), "24 layers do not divide by 5"),
    "experts": (Layout(64, expert=64), "32 experts do not divide by 64"),
    "context heads": (Layout(16, tensor=4, context=4), "a2a"),
    "context length": (Layout(8, context=8), "1540 tokens do not divide by 2 x 8"),
    "sequence": (Layout(8, tensor=8), "1540 tokens do not divide by 8 x 1"),
    "world": (Layout(6, tensor=4), "6 ranks do not divide by TP4"),
    "expert world": (Layout(6, expert=4), "6 ranks do not divide by ETP1 x EP4"),
    "batch": (Layout(3), "DP3: 256 episodes do not divide by 3"),
}


@pytest.mark.parametrize("kind", REACHED)
def test_every_reason_refuses_a_layout_in_one_line(kind):
    layout, words = REACHED[kind]
    found = impossible(GPT_OSS_20B, layout, 256, 1540)
    assert found is not None and found[0] == kind and words in found[1] and "\n" not in found[1]


def test_the_vocabulary_is_the_reason_left_and_none_is_unreached():
    odd = {**GPT_OSS_20B, "vocab_size": 201_087}
    assert impossible(odd, Layout(2, tensor=2), 256, 1536)[0] == "vocabulary"
    assert set(REACHED) | {"vocabulary"} == set(REASONS)
    assert impossible(GPT_OSS_20B, Layout(8, tensor=8, expert=8), 256, 1536) is None


# --- memory -----------------------------------------------------------------------------------------------------------
def test_bytes_of_eight_gpus_by_hand():
    """GB a GPU of gpt-oss-20b, all trained: TP8 EP8, and TP1 EP8 with the distributed optimizer."""
    for layout, weights, gradients, adam in (
        (Layout(8, tensor=8, expert=8), 5.2, 10.5, 31.4),
        (Layout(8, expert=8, distributed_optimizer=True), 8.4, 16.7, 31.4),
        (Layout(2, tensor=2, expert=2), 20.9, 41.8, 125.5),
    ):
        found = {name: size / 1e9 for name, size in memory.predicted_trainer_bytes(FULL, layout).items()}
        assert found["weights"] == pytest.approx(weights, abs=0.06)
        assert found["gradients"] == pytest.approx(gradients, abs=0.06)
        assert found["Adam moments"] + found["master weights"] == pytest.approx(adam, abs=0.06)


def test_static_bytes_are_those_of_megatrons_tensors():
    """To the byte, as helpers.memory.device_bytes found them on the recorded H200."""
    found = calibration.recorded_phases("gpu-20b")["optimizer step"]
    predicted = memory.trainer_phases(FROZEN, 6144)["optimizer step"]
    for item in ("trainer weights", "trainer gradients", "trainer optimizer"):
        assert found[item] == predicted[item]


@given(
    tensor=st.sampled_from([1, 2, 4]),
    data=power,
    expert=st.sampled_from([1, 2, 4, 8]),
    frozen=st.booleans(),
    micro=power,
)
@settings(max_examples=40, deadline=None)
def test_more_sharding_never_needs_more_memory(tensor, data, expert, frozen, micro):
    """Twice the data-, tensor- or expert-parallel ranks: each phase falls or stays."""
    profile = FROZEN if frozen else FULL
    constants, tokens = calibration.fitted(), micro * 1536
    ranks = tensor * data
    assume(ranks % expert == 0)

    def peaks(**sizes) -> dict[str, int]:
        layout = Layout(**sizes, distributed_optimizer=True)
        phases = planner.trainer_card(profile, tokens, layout, 0, constants)
        return {phase: sum(items.values()) for phase, items in phases.items()}

    before = peaks(ranks=ranks, tensor=tensor, expert=expert)
    for after in (
        peaks(ranks=2 * ranks, tensor=tensor, expert=expert),
        peaks(ranks=2 * ranks, tensor=2 * tensor, expert=expert),
        peaks(ranks=2 * ranks, tensor=tensor, expert=2 * expert),
    ):
        assert all(after[phase] <= before[phase] + 2 for phase in before)  # rounded up twice


def test_recomputation_keeps_a_layers_input_and_one_whole_layer():
    plain, again = (memory.predicted_activation_bytes(FULL, 1000, Layout(recompute=r)) for r in (False, True))
    once = 1000 * 2 * 2 * 2880  # the final norm
    assert again - once == 1000 * 2 * 24 * 2880 + (plain - once) // 24


def test_a_pipelines_first_stage_holds_as_many_micro_batches_as_stages():
    whole = memory.predicted_activation_bytes(FULL, 1000, Layout()) - 1000 * 4 * 2880
    first = memory.predicted_activation_bytes(FULL, 1000, Layout(4, pipeline=4), 0)
    last = memory.predicted_activation_bytes(FULL, 1000, Layout(4, pipeline=4), 3)
    assert first == whole and last == whole // 4 + 1000 * 4 * 2880
    middle = memory.trainer_phases(FULL, 1000, Layout(4, pipeline=4), 1)
    assert middle["forward-backward"]["logits"] == 0


@given(engine=st.sampled_from([1, 2, 4, 8, 16]))
def test_an_engine_is_cut_and_heads_are_copied_beyond_their_number(engine):
    one, cut = (memory.server_bytes(FROZEN, n) for n in (1, engine))
    assert cut["server weights"] >= one["server weights"] / engine
    assert cut["server weights"] == pytest.approx(one["server weights"] / engine, rel=0.01)
    assert cut["server KV cache"] == one["server KV cache"] // min(engine, 8)


def test_phases_of_one_card_are_the_trainers_and_the_servers():
    """A profile without memory saver keeps the cache; gpu-20b gives it back before the server resumes."""
    constants = calibration.fitted("small")
    frozen = planner.predicted_card(FROZEN, 6144, constants)
    assert "server weights" not in frozen["forward-backward"] and "server weights" in frozen["resume"]
    assert frozen["resume"]["allocator's reserve"] < frozen["optimizer step"]["allocator's reserve"]
    small = planner.predicted_card(load_profile("gpu"), 32_768, constants)
    assert small["sync"]["allocator's reserve"] > 10e9 and small["offload"]["allocator's reserve"] < 1e9


# --- time -------------------------------------------------------------------------------------------------------------
def plan(profile=FULL, gpus=8, layout=None, **how):
    layout = layout or Layout(gpus, expert=gpus, distributed_optimizer=True)
    return make_plan(profile, work_of(profile), Cluster(H200, gpus), layout, **how)


def test_one_rank_waits_for_nobody():
    seconds = plan(FROZEN, 1, Layout()).seconds
    assert seconds["collectives"] == seconds["bubble"] == 0


def test_the_parts_are_the_step():
    colocated = plan()
    assert colocated.step == pytest.approx(sum(colocated.seconds.values()))
    half = plan(layout=Layout(4, expert=4, distributed_optimizer=True), placement=SPLIT, engines=4)
    s = half.seconds
    update = sum(s[part] for part in planner.UPDATE_PARTS)
    assert half.step == pytest.approx(max(s["rollout"] + s["score"], update) + s["sync"])
    assert half.step < sum(s.values()) and "4 train, 4 generate" in str(half)


@given(gpus=st.sampled_from([1, 2, 4]), micro=st.sampled_from([1, 2, 4]))
@settings(max_examples=12, deadline=None)
def test_more_data_parallel_ranks_and_larger_micro_batches_are_not_slower(gpus, micro):
    def update(n, size):
        found = plan(FROZEN, n, Layout(n, distributed_optimizer=n > 1), micro_batch=size).seconds
        return found["compute"] + found["host"]

    assert update(2 * gpus, micro) <= update(gpus, micro) * 1.001
    assert update(gpus, 2 * micro) <= update(gpus, micro) * 1.001


def test_a_slow_link_and_a_group_across_nodes_cost_time():
    card, work = H200, work_of(FULL)
    layout = Layout(16, tensor=8, expert=16, distributed_optimizer=True)
    near, far = (make_plan(FULL, work, Cluster(card, 16, per), layout, engines=16) for per in (16, 8))
    assert far.seconds["collectives"] > 2 * near.seconds["collectives"]
    assert near.warnings == () and "EP16 crosses nodes" in far.warnings[0]
    across = make_plan(FULL, work, Cluster(card, 16, 4), Layout(16, tensor=8, expert=8), engines=16)
    assert "TP8 crosses nodes" in across.warnings[0]


def test_requests_are_limited_by_the_profile_and_by_the_pool():
    work = work_of(FULL)
    assert planner.at_once(FULL, work, 8) == (32, 1)
    assert planner.at_once(FULL, work, 1) == (64, 4)
    small = load_profile("cluster", **{"rollout.max_total_tokens": 1536 * 16})
    assert planner.at_once(small, work, 1) == (16, 16)
    with pytest.raises(ValueError, match="does not hold one answer"):
        planner.at_once(load_profile("cluster", **{"rollout.max_total_tokens": 1000}), work, 1)


def test_offloading_takes_time_and_gives_memory():
    layout = Layout(8, tensor=2, expert=8, distributed_optimizer=True)
    stays, away = (plan(layout=layout, engines=8, placement=p) for p in (COLOCATED, OFFLOADED))
    assert away.step > stays.step and away.peak < stays.peak


def test_what_the_trainer_does_not_set_is_said():
    assert any("a2a" in w for w in plan(layout=Layout(8, context=2, distributed_optimizer=True)).warnings)
    assert any("granularity" in w for w in plan(layout=Layout(8, expert=8, recompute=True)).warnings)


# --- refusals and search ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how, words", [
    (dict(layout=Layout(8, expert_tensor=2, tensor=2)), "Megatron-LM 2383"),
    (dict(engine=3), "do not divide"),
    (dict(engine=16), "lives in one node"),
    (dict(micro_batch=5), "micro-batches of 5"),
    (dict(placement="colocted"), "did you mean 'colocated'"),
])  # fmt: skip
def test_a_plan_that_cannot_be_says_why(how, words):
    with pytest.raises(ValueError, match=words):
        plan(**how)


def test_a_pool_too_small_for_an_answer_refuses_the_engine():
    small = load_profile("cluster", **{"rollout.max_total_tokens": 1000})
    found = search(small, Cluster(H200, 1))
    assert found.best is None and {r.kind for r in found.refused} >= {"KV pool"}


@pytest.mark.parametrize("arguments, words", [
    (dict(gpus=0), "at least 1"), (dict(gpus=12), "do not fill nodes of 8"),
])  # fmt: skip
def test_clusters_that_cannot_be(arguments, words):
    with pytest.raises(ValueError, match=words):
        Cluster(H200, **arguments)


@pytest.fixture(scope="module")
def found():
    """Eight H100 and all of gpt-oss-20b trained, on nodes with little memory."""
    return search(FULL, Cluster(H100, 8, host_memory=3.0e11))


def test_what_is_found_fits_and_what_is_refused_says_why(found):
    room = (1 - planner.MARGIN) * H100.memory
    assert found.plans and all(p.fits and p.peak <= room for p in found.plans)
    kinds = {r.kind for r in found.refused}
    assert kinds >= {"memory", "host memory", "expert tensors"} and kinds <= set(REASONS) | set(
        planner.PLAN_REASONS
    )
    steps = [round(p.step, 1) for p in found.plans]
    assert steps == sorted(steps)
    assert found.reason().startswith(f"fastest of {len(found.plans)} that fit")
    table = planner.refusal_table(found.refused)
    assert sum(count for _, count, _ in table) == len(found.refused)


def test_a_searched_plan_is_the_plan_that_is_made(found):
    for p in (found.plans[0], found.plans[len(found.plans) // 2], found.plans[-1]):
        made = make_plan(
            FULL, work_of(FULL), p.cluster, p.layout, p.placement, p.engines, p.engine, p.micro_batch
        )
        assert made.seconds == p.seconds and made.memory == p.memory


def test_each_placement_is_tried(found):
    assert {p.placement for p in search(FROZEN, Cluster(H200, 2)).plans} == set(PLACEMENTS)


def test_a_whole_20b_does_not_train_on_one_card():
    found = search(FULL, Cluster(H200, 1))
    assert found.best is None and "nothing fits; nearest" in found.reason()
    assert search(FROZEN, Cluster(H200, 1)).best is not None


def test_unknown_models_are_refused_and_120b_is_larger():
    big = planner.with_model(FULL, "120b", all_trained=True)
    assert memory.parameter_count(big) == total_parameters(GPT_OSS_120B) and not big.trainer.freeze_experts
    assert planner.with_model(FROZEN, "") == FROZEN
    with pytest.raises(ValueError, match="20b or 120b"):
        planner.with_model(FULL, "7b")


# --- beside the recorded runs -----------------------------------------------------------------------------------------
def test_runs_that_were_not_fitted_on_are_predicted_within_the_limits():
    """A phase's memory within 10%, a step within 25%; the small fit has seen no 20b run of 24 layers."""
    rows = planner.judge("small")
    worst_memory, worst_step = planner.worst(rows)
    assert worst_memory <= 0.10 and worst_step <= 0.25
    judged = {(r["profile"], r["quantity"]) for r in rows if r["role"] == "judged"}
    assert ("gpu-20b", "step") in judged and sum("memory" in q for _, q in judged) == len(memory.PHASES)


def test_the_larger_fit_says_that_it_has_seen_the_20b_update():
    roles = {(r["profile"], r["run"], r["quantity"]): r["role"] for r in planner.judge("all")}
    assert roles["gpu-20b", "06_train", "update"] == "fit"
    small, everything = calibration.fitted("small"), calibration.fitted("all")
    assert (
        small.host_layer == small.host_layer_frozen == everything.host_layer != everything.host_layer_frozen
    )
    assert set(calibration.SOURCES) | {"rates"} == {f.name for f in dataclasses.fields(calibration.Constants)}


def test_constants_come_from_files_that_are_there(monkeypatch):
    with pytest.raises(ValueError, match="no fit 'medium'"):
        calibration.fitted("medium")
    with pytest.raises(FileNotFoundError, match="restore it from git"):
        calibration.table(PROJECT_ROOT / "tests/gpu/recorded/no_such.csv")


def test_the_predictions_were_written_before_the_runs():
    """Committed with date and commit; both machines of the plan, memory and time."""
    file = PROJECT_ROOT / "tests/gpu/recorded/planner_predictions.csv"
    note = file.read_text().splitlines()[0]
    assert note.startswith("# 20") and "commit" in note
    rows = calibration.table(file)
    names = {r["target"] for r in rows}
    assert {"2 GPUs, TP2 EP2 DP1, colocated, 2 x TP1", "8 GPUs, TP8 EP8 DP1, colocated, 1 x TP8"} <= names
    for name in names:
        mine = {r["quantity"]: float(r["value"]) for r in rows if r["target"] == name}
        assert mine["step"] > mine["sync"] > 0 and any(
            q.startswith("memory") and v > 20 for q, v in mine.items()
        )


# --- the command ------------------------------------------------------------------------------------------------------
def test_the_command_recommends(capsys):
    assert planner.main(["--profile", "gpu-20b", "--gpus", "2", "--card", "h100", "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "recommended: " in out and "fastest of" in out and "Megatron-LM 2383" in out


def test_the_command_judges_and_predicts(capsys, tmp_path: Path):
    assert planner.main(["judge"]) == 0 and "07_memory" in capsys.readouterr().out
    assert planner.main(["predict", "--out", str(tmp_path / "p.csv")]) == 0
    with (tmp_path / "p.csv").open() as file:
        assert file.readline().startswith("# ") and list(csv.DictReader(file))


@pytest.mark.parametrize("arguments", [["predict"], ["--gpus", "12"], ["--model", "7b"]])
def test_the_command_says_what_is_wrong(capsys, arguments):
    assert planner.main(arguments) == 2
    assert capsys.readouterr().err.startswith("no plan: ")

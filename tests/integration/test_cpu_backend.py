"""The CPU back end is switched on by the setting alone, and holds where it was installed."""

import threading

import pytest
import torch

from helpers.cpu import megatron_backend
from helpers.cpu.megatron_backend import WrongBackend
from helpers.profiles import DEVICE_VARIABLE

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("told", [None, "cuda", ""])
def test_it_is_refused_in_a_process_that_was_not_told_cpu(monkeypatch, told):
    monkeypatch.delenv(DEVICE_VARIABLE)
    if told is not None:
        monkeypatch.setenv(DEVICE_VARIABLE, told)
    with pytest.raises(WrongBackend, match="process_environment"):
        megatron_backend.install()


def test_it_is_refused_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(WrongBackend, match="sees a GPU"):
        megatron_backend.install()


def _in_a_thread(function):
    """What `function` raises in another thread, or None."""
    raised = []

    def call():
        try:
            function()
        except Exception as error:  # handed to the test's thread
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    return raised[0] if raised else None


def test_another_thread_is_refused_before_it_computes(trainer):
    assert isinstance(_in_a_thread(megatron_backend.require_mode), WrongBackend)
    assert isinstance(_in_a_thread(trainer.export), WrongBackend)
    assert "synchronous Ray actor" in str(_in_a_thread(lambda: trainer.save("unused")))
    megatron_backend.require_mode()  # this thread is as it was


def test_installing_twice_changes_nothing(trainer):
    from torch.overrides import _get_current_function_mode_stack

    def names():
        return [type(mode).__name__ for mode in _get_current_function_mode_stack()]

    before = names()
    megatron_backend.install()
    assert names() == before and before.count("CudaMeansCpu") == 1


def test_only_devices_are_renamed(trainer):
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2).to("cuda").device.type == "cpu"
    assert torch.zeros(2, device=torch.device("cuda", 0)).cuda().device.type == "cpu"
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.equal(torch.arange(3).to("cuda") * 2, torch.tensor([0, 2, 4]))
    assert not torch.cuda.is_available()  # code that asks is told the truth


def test_the_stand_in_for_transformer_engine_is_gone(trainer):
    import importlib
    import sys

    assert "transformer_engine" not in sys.modules
    with pytest.raises(ImportError):
        importlib.import_module("transformer_engine.pytorch")

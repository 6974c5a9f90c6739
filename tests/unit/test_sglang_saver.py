"""The hook that puts SGLang's hybrid KV pools under the memory saver: what it changes, and that it is off by default."""

import pytest

from helpers import sglang_saver


class Pool:
    """Keeps what it was built with, as SGLang's pools do."""

    def __init__(self, **kwargs):
        self.kwargs = kwargs


def swa_pool(self, *, token_to_kv_pool_class, **kwargs):
    """What SWAKVPool.__init__ does with the flag: overwrite it, then build its two pools."""
    kwargs["enable_memory_saver"] = False
    self.pools = [token_to_kv_pool_class(size=size, **kwargs) for size in (10, 3)]


class Hybrid:
    pass


def test_both_pools_get_the_flag_and_keep_the_rest():
    hybrid = Hybrid()
    sglang_saver.pools_under_the_saver(swa_pool, hybrid, token_to_kv_pool_class=Pool, page_size=1)
    assert [p.kwargs for p in hybrid.pools] == [
        {"size": size, "page_size": 1, "enable_memory_saver": True} for size in (10, 3)
    ]


def test_a_changed_upstream_is_refused():
    with pytest.raises(TypeError, match="swa_memory_pool.py"):
        sglang_saver.pools_under_the_saver(swa_pool, Hybrid(), page_size=1)


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_hooked_unless_the_environment_says_so(monkeypatch, value):
    """register() would import SGLang, which takes half a minute; it must not where nobody asked."""
    import sys

    monkeypatch.delenv(sglang_saver.KV_SAVER_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(sglang_saver.KV_SAVER_VARIABLE, value)
    before = {name for name in sys.modules if name.startswith("sglang")}
    sglang_saver.register()
    assert {name for name in sys.modules if name.startswith("sglang")} == before


@pytest.mark.parametrize("environment", [{}, {"LD_PRELOAD": "/lib/other.so"}])
def test_the_saver_keeps_its_mode_where_it_was_not_preloaded(environment):
    """As in the HTTP server's process; and nothing is imported for it."""
    assert sglang_saver.restore_preload(environment) is False


def test_megatron_still_changes_the_savers_mode():
    """Why restore_preload is there. If this fails, megatron-core leaves the mode alone and the function may go."""
    from importlib.metadata import distribution

    source = distribution("megatron-core").locate_file("megatron/core/inference/contexts/dynamic_context.py")
    assert 'torch_memory_saver.hook_mode = "torch"' in source.read_text()

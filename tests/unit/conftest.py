"""What several unit tests share. Nothing here imports torch before a test asks for it."""

import pytest


@pytest.fixture(scope="session")
def uneven():
    """(folder, generator, **model settings) -> a checkpoint in which no tensor is constant and some gates pass the clamp at 7,
    so that every fault can show."""
    import torch
    from safetensors.torch import load_file

    from helpers.checkpoints import save_weights, write_tiny_checkpoint
    from helpers.profiles import load_profile

    def make(folder, generator, **model):
        random = write_tiny_checkpoint(load_profile("cpu", **model), folder / "random")
        weights = load_file(random / "model.safetensors")
        for name, tensor in weights.items():
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            if name.endswith("gate_up_proj"):
                tensor *= 4
        return save_weights(weights, random, folder / "uneven")

    return make


@pytest.fixture(scope="module")
def one_thread():
    """The tensors are tiny: a second thread only waits."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, uneven):
    """(checkpoint, an earlier one): hidden_size == intermediate_size, so that a transposed down_proj fits."""
    import torch

    root, generator = tmp_path_factory.mktemp("square"), torch.Generator().manual_seed(1)
    return tuple(uneven(root / n, generator, **{"model.intermediate_size": 64}) for n in ("now", "older"))

"""Stands for the CUDA-only `sgl_kernel` in a CPU server, which imports a few names from it and calls none of them.

Only servers of a CPU profile have this folder on their path; a call raises instead of computing something else.
"""

__version__ = "0.0.0+cpu"


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA kernel; this server runs on the CPU")

    return absent

"""Everything that exists only because there is no GPU: a Megatron back end, an SGLang plugin, a kernel stub, their manifest.

Nothing here acts by itself. The profile hands GRPO_DEVICE=cpu to a process (helpers.profiles.Profile.process_environment),
and only then do `megatron_backend.install` and `sglang_plugin.register` change anything.
"""

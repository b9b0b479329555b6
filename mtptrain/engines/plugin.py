"""What vLLM loads from mtptrain (entry point group `vllm.general_plugins`): the class that serves a norm-complete MTP head.

Imported in every process of vLLM, so it imports nothing itself.
"""

ARCHITECTURE = "EagleMtpHead"
"""`architectures` of an exported plugin folder. vLLM takes a name that starts with Eagle as it is."""
ENTRY_POINT = "[vllm.general_plugins]\nmtptrain = mtptrain.engines.plugin:register\n"


def register() -> None:
    """Tell vLLM's registry where the class is; it is imported only when a folder asks for it."""
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, "mtptrain.engines.vllm_model:EagleMtpHead")

"""Which devices the towers of a service run on."""

import torch

from app.settings import InvalidSettings, Settings


def tower_devices(settings: Settings, device: torch.device) -> list[torch.device]:
    """One device per tower: `device` itself, or the first GPUs in the order PyTorch numbers them, or the CPU N times.

    Counts GPUs, and touches none.

    Raises:
        InvalidSettings: more towers than there are GPUs, or several on one that is named.
    """
    asked = settings.data_parallel_size
    if device.type == "cpu":
        return [device] * (1 if asked == "auto" else asked)
    there = torch.cuda.device_count()
    if device != torch.device("cuda"):
        if asked not in (1, "auto"):
            raise InvalidSettings(
                f"--data-parallel-size {asked} with --device {device}: that is one GPU; use --device cuda, "
                f"which has {_gpus(there)}"
            )
        return [device]
    wanted = max(there, 1) if asked == "auto" else asked
    if wanted == 1:
        return [device]
    if wanted > there:
        raise InvalidSettings(f"--data-parallel-size {wanted}: {_gpus(there)} visible to PyTorch {torch.__version__}")
    return [torch.device("cuda", index) for index in range(wanted)]


def _gpus(there: int) -> str:
    names = f" (cuda:0 to cuda:{there - 1})" if there > 1 else ""
    return f"{there} GPU{'' if there == 1 else 's'}{names}"


def cpu_threads(num_towers: int) -> int:
    """Threads of each of several towers that share the cores: together as many as PyTorch would take for one."""
    return max(1, torch.get_num_threads() // num_towers)

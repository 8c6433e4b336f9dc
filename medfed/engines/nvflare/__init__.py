"""The NVFlare engine: the same methods between real hospitals, or in NVFlare's simulator.

medfed's server runs inside NVFlare's server process, a client inside each site's. NVFlare connects, authenticates and
moves bytes; what they mean, who takes part and what is refused is medfed's. Everything that imports NVFlare is here.
"""

from importlib.util import find_spec

from medfed.errors import ConfigError


class NVFlareMissing(ConfigError, ImportError):
    """NVFlare is not installed."""


if find_spec("nvflare") is None:
    raise NVFlareMissing("the NVFlare engine needs NVFlare 2.9.", fix="Install it: pip install 'medfed[nvflare]'")

"""The way from a sandbox to the network: an HTTP proxy outside of it, in the process that opened the sandbox.

An adapter makes one `EgressProxy` per sandbox and hands it each connection, as any pair of streams:

    proxy = EgressProxy(network, name=sandbox_id)
    await proxy.serve(reader, writer)

shared.sandbox.gateway does so for connections that the loop inside carries; programs find it by `environment(port,
certificates)`. The sandbox has no other network. docs/sandboxes.md, "Network", says what it promises.

Importing it raises SandboxUnavailable where the packages of the extra `egress` are missing.
"""

from shared.sandbox import SandboxUnavailable
from shared.sandbox.egress.environment import environment

try:
    import h11  # noqa: F401
    import idna  # noqa: F401
except ImportError as error:
    raise SandboxUnavailable(
        f"a network for sandboxes needs the packages h11 and idna ({error}); pip install 'etude[egress]', or allow no network"
    ) from None

from shared.sandbox.egress.limits import EgressLimits
from shared.sandbox.egress.network import from_json, parse, parse_credentials, to_json
from shared.sandbox.egress.proxy import EgressProxy

__all__ = ["EgressLimits", "EgressProxy", "environment", "from_json", "parse", "parse_credentials", "to_json"]

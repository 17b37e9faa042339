"""The variables by which programs in a sandbox find the proxy and trust its certificates."""

from __future__ import annotations

# Everything but Java, which wants a key store, and programs that bring their own list (Deno's default, pinned clients).
_BUNDLES = (
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO"),
    *("CARGO_HTTP_CAINFO", "AWS_CA_BUNDLE", "DENO_CERT"),
)


LOCAL = "localhost,127.0.0.1,::1"  # servers that the sandbox itself runs, and the way to ours


def direct() -> dict[str, str]:
    """Return the variables by which programs in the sandbox ask no proxy for what it serves itself. An image may name a proxy."""
    return {"NO_PROXY": LOCAL, "no_proxy": LOCAL}


def environment(port: int, certificates: str = "") -> dict[str, str]:
    """Return the variables for programs in the sandbox. `port`: where the forwarder listens, on 127.0.0.1 of the sandbox.

    `certificates`: the path, inside, of a file with `EgressProxy.certificates`; empty: there are none.
    """
    proxy = f"http://127.0.0.1:{port}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    variables = {spelled: proxy for name in names for spelled in (name, name.lower())}
    variables |= direct() | {"NODE_USE_ENV_PROXY": "1"}
    return variables | ({name: certificates for name in _BUNDLES} if certificates else {})

"""What the egress policy lets through: names in one spelling, public addresses, one server name per handshake."""

import contextlib
import ipaddress
import json
import socket
import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="the network of sandboxes is an extra: etude[egress]")
pytest.importorskip("h11", reason="the network of sandboxes is an extra: etude[egress]")

from shared.sandbox.contract import NO_NETWORK, Credential, Decision, Network
from shared.sandbox.egress import from_json, headers, hello, parse, parse_credentials, policy, reach, to_json

V4 = st.integers(0, 2**32 - 1).map(ipaddress.IPv4Address)
V6 = st.integers(0, 2**128 - 1).map(ipaddress.IPv6Address)
FORBIDDEN_NETWORKS = [
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"),
    *("192.0.0.0/24", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4", "168.63.129.16/32"),
    *("::1/128", "::/128", "::/96", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8", "fd00:ec2::254/128", "2002::/16"),
    *("2001::/32", "2001:db8::/32", "64:ff9b:1::/48", "100::/64"),
]


def within(network: str) -> st.SearchStrategy:
    net = ipaddress.ip_network(network)
    kind = ipaddress.IPv4Address if net.version == 4 else ipaddress.IPv6Address
    return st.integers(int(net.network_address), int(net.broadcast_address)).map(kind)


def spellings(address: ipaddress.IPv4Address) -> list[str]:
    """Texts that some resolver reads as the address."""
    number, octets = int(address), list(address.packed)
    a, b, c, d = octets
    plain = [
        str(address), str(number), hex(number), f"0{number:o}", f"0X{number:X}", ".".join(map(hex, octets)),
        ".".join(f"0{octet:o}" for octet in octets), f"{a}.{number & 0xFFFFFF}", f"{a}.{b}.{number & 0xFFFF}",
        f"{a}.{b:#x}.0{c:o}.{d}", f"00000{a:o}.{b}.{c}.{d}", f"::ffff:{address}", f"[::ffff:{address}]",
        f"::ffff:{number >> 16:x}:{number & 0xFFFF:x}", f"::{address}", f"64:ff9b::{address}", f"user@{address}",
    ]  # fmt: skip
    wide = [text.translate({ord(c): ord(c) + 0xFEE0 for c in "0123456789"}) for text in plain]
    dotted = [text.replace(".", dot) for text in plain for dot in ("。", "．", "｡")]
    return [*plain, *wide, *dotted, *(text + "." for text in plain)]


@given(V4)
def test_no_spelling_of_an_address_is_a_name(address):
    for text in spellings(address):
        with pytest.raises(ValueError):
            policy.hostname(text)


@given(V6, st.sampled_from(["{}", "[{}]", "{}%eth0", "[{}%25eth0]", "{}."]))
def test_no_spelling_of_an_ipv6_address_is_a_name(address, form):
    for text in (str(address), address.exploded, address.exploded.upper()):
        with pytest.raises(ValueError):
            policy.hostname(form.format(text))


@given(st.text(max_size=30) | st.from_regex(r"[0-9a-fxA-FX.\-_]{1,20}", fullmatch=True))
def test_a_name_is_never_what_the_resolver_reads_as_an_address(text):
    try:
        name = policy.hostname(text)
    except ValueError:
        return
    assert policy.hostname(name) == name, "one spelling"
    assert name == name.lower()
    assert not set(name) & set(" @/\\:%[]?#\t\r\n\0")
    with pytest.raises(OSError):
        socket.inet_aton(name)
    with pytest.raises(OSError):
        socket.inet_pton(socket.AF_INET6, name)


@given(st.sampled_from(FORBIDDEN_NETWORKS).flatmap(within))
def test_no_forbidden_address_may_be_reached_in_any_form(address):
    assert policy.forbidden(address)
    if address.version == 4:
        for prefix in ("::ffff:0:0", "64:ff9b::", "::", "64:ff9b:1::"):
            assert policy.forbidden(ipaddress.IPv6Address(int(ipaddress.IPv6Address(prefix)) + int(address)))
        assert policy.forbidden(ipaddress.IPv6Address((0x2002 << 112) | (int(address) << 80))), "6to4"


@given(V4 | V6)
def test_what_may_be_reached_is_global_also_for_the_library(address):
    if policy.forbidden(address) is None:
        assert address.is_global or address in ipaddress.ip_network("64:ff9b::/96") or address.version == 6
        assert not any((address.is_private, address.is_loopback, address.is_link_local, address.is_multicast))


def test_public_addresses_may_be_reached_and_scoped_ones_not():
    for text in ("93.184.215.14", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::1.1.1.1"):
        assert policy.forbidden(ipaddress.ip_address(text)) is None, text
    assert policy.forbidden(ipaddress.ip_address("2606:4700::1%eth0"))


def test_the_machines_own_address_is_refused_though_no_table_has_it(monkeypatch):
    monkeypatch.setattr(policy, "forbidden", lambda address: None)
    assert "own" in (reach.forbidden_here(ipaddress.ip_address("127.0.0.1")) or "")
    assert "own" in (reach.forbidden_here(ipaddress.ip_address("127.9.8.7")) or "")
    assert reach.forbidden_here(ipaddress.ip_address("1.1.1.1")) is None


def test_one_forbidden_address_refuses_a_name():
    assert reach.checked(["1.1.1.1", "1.0.0.1"], policy.forbidden) == ("1.1.1.1", "1.0.0.1")
    for found in (["1.1.1.1", "10.0.0.1"], ["::ffff:10.0.0.1"], ["fe80::1%2"], ["nonsense"], []):
        with pytest.raises(policy.Refused):
            reach.checked(found, policy.forbidden)


LABEL = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
NAME = st.lists(LABEL, min_size=1, max_size=3).map(lambda labels: ".".join([*labels, "test"]))


@given(NAME, NAME, st.integers(1, 65535))
def test_a_rule_permits_its_name_and_ports_alone(name, other, port):
    plain, ported, below = (policy.Policy([text]) for text in (name, f"{name}:8443", f"*.{name}"))
    kinds, hosts = {"plain": plain, "ported": ported, "below": below}, (name, other, f"a.{name}", f"a{name}")
    permitted = {(kind, host): _permits(one, host, port) for kind, one in kinds.items() for host in hosts}
    assert permitted["plain", name] == (port in (80, 443))
    assert permitted["ported", name] == (port == 8443)
    assert not permitted["below", name]
    assert permitted["below", f"a.{name}"] == (port in (80, 443))
    assert not permitted["plain", f"a.{name}"]
    assert not permitted["below", f"a{name}"]
    if other != name and not other.endswith("." + name):
        assert not any(permitted[kind, other] for kind in ("plain", "ported", "below"))


def _permits(one: policy.Policy, host: str, port: int) -> bool:
    try:
        one.permit(host, port)
    except policy.Refused:
        return False
    return True


@pytest.mark.parametrize("text", [
    "", ".", "*", "*.", "*.com", "a.*", "10.0.0.1", "*.10.0.0.1", "[::1]:443", "::1", "name:0", "name:65536", "name:", "name:http",
    "http://name", "name/path", "user@name", "na me", "-name", "name..test", "x" * 64, "a." * 127 + "test", "*.name.test:443",
])  # fmt: skip
def test_an_entry_that_is_no_rule_says_what_is_allowed(text):
    with pytest.raises(ValueError, match=r"found .*allowed: 'name', 'name:port' or '\*\.name'"):
        policy.rule(text)


def test_names_are_compared_in_one_spelling():
    assert policy.Policy(["Bücher.Example."]).permit("xn--bcher-kva.example", 443).text == "Bücher.Example."
    assert policy.authority("EXAMPLE.test.:443") == ("example.test", 443)


# The problem's field


SECRET = "Bearer 0123456789abcdef"
KNOWN = {"index": Credential("index.test", "Authorization", SECRET)}


def test_the_field_of_a_problem_is_read():
    assert parse("none") == parse(None) == NO_NETWORK
    assert parse(["pypi.test", "*.b.test"]) == Network(("pypi.test", "*.b.test"))
    asked = {"allow": ["index.test:443"], "credentials": ["index"]}
    assert parse(asked, KNOWN) == Network(("index.test:443",), (KNOWN["index"],))


@pytest.mark.parametrize(("found", "message"), [
    ("all", "field 'network': found 'all'; allowed: 'none', a list of hosts, or an object"),
    (True, "field 'network': found True; allowed: 'none'"),
    ({"alow": []}, "field 'network': found the key 'alow'; allowed: 'allow', 'credentials'"),
    ({"allow": "pypi.test"}, "field 'network.allow': found 'pypi.test'; allowed: a list of texts"),
    (["ok.test", "10.0.0.1"], r"field 'network.allow\[1\]': found '10.0.0.1' .*allowed: 'name'"),
    (["a.test"] * 1001, "field 'network.allow': found 1001 entries; allowed: at most 1000"),
    ({"allow": ["a.test"], "credentials": ["no"]}, r"field 'network.credentials\[0\]': found 'no'; allowed: 'index'"),
    ({"allow": ["a.test"], "credentials": ["index"]}, "which is for index.test; allowed: credentials of a host in 'allow'"),
])  # fmt: skip
def test_a_wrong_field_is_named_with_what_is_allowed(found, message):
    with pytest.raises(ValueError, match=message) as raised:
        parse(found, KNOWN)
    assert SECRET not in str(raised.value)


def test_without_credentials_a_worker_says_so():
    with pytest.raises(ValueError, match="this worker has no credentials"):
        parse({"allow": ["index.test"], "credentials": ["index"]})


def test_a_workers_credentials_are_read_and_no_error_shows_a_value():
    good = {"index": {"host": "INDEX.test", "header": "Authorization", "value": SECRET}}
    assert parse_credentials(json.dumps(good)) == KNOWN
    wrong = [
        {"host": "10.0.0.1"},
        {"header": "Host"},
        {"header": "a b"},
        {"value": SECRET + "\r\nX: y"},
        {"value": ""},
        {"more": SECRET},
    ]
    for change in wrong:
        with pytest.raises(ValueError, match="credentials: field 'index': ") as raised:
            parse_credentials(json.dumps({"index": good["index"] | change}))
        assert "0123456789" not in str(raised.value)
    for text in ('{"index": ' + SECRET, f'["{SECRET}"]', f'{{"index": "{SECRET}"}}'):
        with pytest.raises(ValueError) as raised:
            parse_credentials(text)
        assert "0123456789" not in str(raised.value)
    assert SECRET not in repr(KNOWN)


@given(
    st.lists(
        st.builds(
            Decision,
            st.floats(0, 1e10),
            st.text(max_size=20),
            st.integers(0, 65535),
            st.booleans(),
            st.text(max_size=20),
        )
    )
)
def test_decisions_survive_their_json(decisions):
    assert from_json(to_json(decisions)) == tuple(decisions)


# Header fields


def pairs(text: str) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in (line.split(": ") for line in text.split("\n"))]


def test_a_client_can_neither_keep_nor_list_nor_drop_a_credential():
    sent = (
        "host: x\nauthorization: mine\nconnection: authorization, content-length, x-drop\nx-drop: 1\ncontent-length: 3"
    )
    sent += "\nproxy-authorization: p\nte: trailers\nupgrade: h2c\naccept: */*"
    kept = headers.request_headers(pairs(sent), b"index.test", [KNOWN["index"]], False)
    right = f"host: index.test\ncontent-length: 3\naccept: */*\nAuthorization: {SECRET}\nconnection: close"
    assert kept == pairs(right)


def test_a_response_that_shows_a_credential_loses_it():
    got = f"x-echo: {SECRET}\nset-cookie: t=0123456789abcdef; Secure\nx-0123456789abcdef: 1\netag: 1\nconnection: x-hop"
    got += "\nx-hop: 1\nalt-svc: h3\ntransfer-encoding: chunked\ncontent-length: 1"
    kept = headers.response_headers(pairs(got), [KNOWN["index"]])
    assert kept == pairs("x-echo: [removed]\nset-cookie: [removed]\netag: 1")


# The TLS handshake


CLIENT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
CLIENT.check_hostname, CLIENT.verify_mode = False, ssl.CERT_NONE


def client_hello(name: str | None) -> bytes:
    out = ssl.MemoryBIO()
    client = CLIENT.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


def with_extension(data: bytes, kind: int, body: bytes) -> bytes:
    """A ClientHello with one more extension, at its end."""
    message = bytearray(data[9:])
    at = 34
    at += 1 + message[at]
    at += 2 + int.from_bytes(message[at : at + 2], "big")
    at += 1 + message[at]
    size = int.from_bytes(message[at : at + 2], "big")
    message += kind.to_bytes(2, "big") + len(body).to_bytes(2, "big") + body
    message[at : at + 2] = (size + 4 + len(body)).to_bytes(2, "big")
    handshake = b"\1" + len(message).to_bytes(3, "big") + message
    return b"\x16\3\1" + len(handshake).to_bytes(2, "big") + handshake


def in_records(data: bytes, size: int) -> bytes:
    message = data[5:]
    pieces = [message[i : i + size] for i in range(0, len(message), size)]
    return b"".join(b"\x16\3\1" + len(piece).to_bytes(2, "big") + piece for piece in pieces)


@given(NAME, st.integers(1, hello.MOST_RECORDS), st.binary(max_size=20))
def test_the_server_name_of_a_real_handshake_is_read_however_it_is_cut(name, records, behind):
    data = client_hello(name)
    data = in_records(data, -(-len(data) // records))
    assert hello.client_hello(data + behind) == (name, len(data))
    for cut in range(0, len(data), 97):
        assert hello.client_hello(data[:cut]) is None


def test_a_handshake_that_hides_its_server_name_is_refused():
    plain = client_hello("good.test")
    sni = b"\0\x0c\0\0\x09evil.test"
    for data, message in [
        (client_hello(None), "without a server name"),
        (with_extension(plain, 0xFE0D, b"x" * 100), "encrypted ClientHello"),
        (with_extension(plain, 0xFFCE, b"x"), "encrypted ClientHello"),
        (with_extension(plain, 0, sni), "an extension twice"),
        (with_extension(client_hello(None), 0, b"\0\x14\0\0\x05a.com\0\0\x09evil.test"), "several server names"),
        (with_extension(client_hello(None), 0, sni + b"x"), "several server names"),
        (plain[:3] + (len(plain) - 5 + 4).to_bytes(2, "big") + plain[5:] + b"\1\0\0\0", "more behind it"),
        (in_records(plain, 20), "in more than 4 records"),
        (b"SSH-2.0-x\r\n", "not a TLS ClientHello"),
        (b"\x80\x2e\1\0\2" + b"x" * 50, "not a TLS ClientHello"),
    ]:
        with pytest.raises(ValueError, match=message):
            hello.client_hello(data)


@given(st.binary(max_size=300) | st.binary(max_size=300).map(lambda b: b"\x16\3\1" + len(b).to_bytes(2, "big") + b))
def test_damage_in_a_handshake_is_a_valueerror(data):
    for read in (hello.client_hello, hello.asks_again):
        with contextlib.suppress(ValueError):
            read(data)


@given(st.data())
def test_a_changed_handshake_raises_nothing_but_valueerror(data):
    sent = bytearray(client_hello("good.test"))
    for _ in range(data.draw(st.integers(1, 4))):
        sent[data.draw(st.integers(5, len(sent) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        hello.client_hello(bytes(sent))

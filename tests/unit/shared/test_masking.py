"""Secrets are masked where people read, and code is left as it is."""

from __future__ import annotations

import inspect
import json
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.masking import masked

# Put together here, so that nobody who scans this repository takes them for real.
SECRETS = {
    "AWS key": "AKIA" + "ABCDEFGHIJKLMNOP",
    "GitHub token": "ghp_" + "a1B2" * 9,
    "GitLab token": "glpat-" + "x" * 20,
    "Slack token": "xoxb-" + "1" * 12,
    "Google key": "AIza" + "b" * 35,
    "API key": "sk-" + "proj-" + "c" * 30,
    "Hugging Face token": "hf_" + "d" * 34,
    "PyPI token": "pypi-" + "e" * 60,
    "npm token": "npm_" + "f" * 36,
    "web token": "eyJ" + "g" * 12 + ".eyJ" + "h" * 12 + "." + "i" * 20,
    "private key": "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIE\nabc\n-----END RSA " + "PRIVATE KEY-----",
}


@pytest.mark.parametrize(("kind", "secret"), SECRETS.items())
@given(before=st.text(max_size=20).map(lambda s: s + " "), after=st.text(max_size=20).map(lambda s: " " + s))
def test_a_secret_is_never_shown_whatever_stands_around_it(kind, secret, before, after):
    shown = masked(f"{before}{secret}{after}")
    assert secret not in shown
    assert f"⟨{kind}⟩" in shown
    assert shown.startswith(before)
    assert masked(shown) == shown


@pytest.mark.parametrize("before", ["-", "token-", "eyJ-token--", "=", "é-", "a.b."])
def test_a_web_token_is_masked_wherever_a_word_begins(before):
    shown = masked(f"{before}{SECRETS['web token']} after")
    assert "ggg" not in shown
    assert "hhh" not in shown
    assert shown.endswith("⟨web token⟩ after")


def test_a_private_key_that_was_cut_off_is_masked_to_the_end():
    assert masked("x\n" + SECRETS["private key"][:45]) == "x\n⟨private key⟩"


@pytest.mark.parametrize("begins", ["eyJ-", "eyJ-----BEGIN A", "hf_" + "A" * 29 + "_", "://a:"])
def test_text_made_of_beginnings_of_secrets_is_read_once(begins):
    text = begins * (1_000_000 // len(begins))
    assert masked(text) == text  # would take minutes, were each beginning followed to the end


def test_of_an_address_the_password_alone_is_masked():
    assert masked("postgresql://etude:hunter22@host/db") == "postgresql://etude:⟨password⟩@host/db"
    assert masked("https://host:8443/a@b") == "https://host:8443/a@b"


@pytest.mark.parametrize("module", [json.decoder, json.encoder, inspect])
def test_code_stays_as_it_is(module):
    text = inspect.getsource(module)
    assert masked(text) == text


def test_hardly_anything_in_the_standard_library_looks_like_a_secret():
    changed = [
        path.name
        for path in Path(sysconfig.get_path("stdlib")).glob("*.py")
        if masked(t := path.read_text(errors="replace")) != t
    ]
    assert len(changed) <= 3, changed

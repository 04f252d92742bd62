// Seals of messages, and what they follow from: by the examples of RFC 4231 (HMAC-SHA256), RFC 5869
// (HKDF) and of GCM's own specification (McGrew and Viega), and by what a stranger may do.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/key_pair.h"
#include "base/seal.h"
#include "base/wire.h"
#include "check.h"

namespace farandole {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::string in_hexadecimal(std::span<const std::byte> bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const std::byte b : bytes) {
    text += kDigits[std::to_integer<size_t>(b >> 4)];
    text += kDigits[std::to_integer<size_t>(b & std::byte{15})];
  }
  return text;
}

std::string hmac(std::string_view key, std::string_view text) {
  const auto half = bytes_of(text).first(text.size() / 2);
  return in_hexadecimal(
      hmac_sha256(bytes_of(key), {half, {}, bytes_of(text).subspan(half.size())}));
}

/// A message as it travels, without its length.
std::vector<std::byte> closed(Sealer& seal, std::string_view message) {
  std::vector<std::byte> frame = framed(bytes_of(message));
  seal.close(frame);
  frame.erase(frame.begin(), frame.begin() + sizeof(uint32_t));
  return frame;
}

bool is_opened(Opener& seal, std::vector<std::byte> message) { return seal.opens(message); }

constexpr Key kKey{std::byte{1}, std::byte{2}};

}  // namespace

TEST(two_key_pairs_share_a_key_that_no_third_has) {
  const KeyPair a, b, stranger;
  const Key shared = a.shared_with(b.public_key());
  CHECK(shared == b.shared_with(a.public_key()));
  CHECK(shared != a.shared_with(stranger.public_key()));
  CHECK(shared != stranger.shared_with(a.public_key()));
}

TEST(what_is_no_public_key_is_refused) {
  for (const size_t count : {0, 31, 32, 33})  // of 32 zeros all would share one key
    CHECK_THROWS(KeyPair().shared_with(std::vector<std::byte>(count)), Error,
                 e.code() == ErrorCode::authentication);
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
  CHECK(equal_in_constant_time(bytes_of("abc"), bytes_of("abc")));
  CHECK(equal_in_constant_time({}, {}));
  CHECK(!equal_in_constant_time(bytes_of("abc"), bytes_of("abx")));
  CHECK(!equal_in_constant_time(bytes_of("bbc"), bytes_of("abc")));
  CHECK(!equal_in_constant_time(bytes_of("abc"), bytes_of("ab")));
}

TEST(seal_of_the_first_example_of_gcm_with_a_key_of_256_bits) {
  Sealer seal(Key{});
  CHECK_EQUAL(in_hexadecimal(closed(seal, "")), "530f8afbc74536b9a963b4f1c4cb738b");
}

TEST(keys_of_the_first_example_of_rfc_5869) {
  std::string salt, purpose;
  for (int i = 0; i < 13; ++i) salt += static_cast<char>(i);
  for (int i = 0; i < 10; ++i) purpose += static_cast<char>(0xf0 + i);
  const Key key = derived_key(bytes_of(std::string(22, '\x0b')), bytes_of(salt), purpose);
  CHECK_EQUAL(in_hexadecimal(key),
              "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf");
}

TEST(seals_open_what_was_closed_in_its_order) {
  Sealer here(kKey);
  Opener there(kKey);
  for (const size_t length : {0U, 1U, 15U, 16U, 17U, 256U, 70'000U})
    CHECK(is_opened(there, closed(here, std::string(length, 'x'))));
}

TEST(seals_notice_every_byte_that_is_changed) {
  for (size_t at = 0; at < 21; ++at) {
    Sealer here(kKey);
    Opener there(kKey);
    std::vector<std::byte> message = closed(here, "hello");
    message[at] ^= std::byte{0x40};
    CHECK(!there.opens(message));
  }
}

TEST(seals_notice_messages_that_are_cut_repeated_left_out_or_exchanged) {
  const auto opens = [](const auto& act) {
    Sealer here(kKey);
    Opener there(kKey);
    std::vector<std::vector<std::byte>> sent;
    for (const char* const text : {"one", "two", "two"}) sent.push_back(closed(here, text));
    act(sent);
    return std::ranges::all_of(sent,
                               [&](const auto& message) { return is_opened(there, message); });
  };
  using Sent = std::vector<std::vector<std::byte>>;
  CHECK(opens([](Sent&) {}));
  CHECK(!opens([](Sent& sent) { sent[0].pop_back(); }));
  CHECK(!opens([](Sent& sent) { sent[0].erase(sent[0].begin()); }));
  CHECK(!opens([](Sent& sent) { sent[0].clear(); }));
  CHECK(!opens([](Sent& sent) { sent[1] = sent[0]; }));
  CHECK(!opens([](Sent& sent) { sent.erase(sent.begin()); }));
  CHECK(!opens([](Sent& sent) { sent.erase(sent.begin() + 1); }));
  CHECK(!opens([](Sent& sent) { std::swap(sent[0], sent[1]); }));
  CHECK(!opens([](Sent& sent) { std::swap(sent[1], sent[2]); }));  // of the same words
}

TEST(seals_of_another_key_are_none) {
  Sealer here(kKey);
  Opener there(Key{});
  CHECK(!is_opened(there, closed(here, "hello")));
}

}  // namespace farandole

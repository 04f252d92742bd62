#include "base/seal.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/copy.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/libcrypto.h"

namespace farandole {
namespace {

using ByteSpan = std::span<const std::byte>;

constexpr int kGetTag = 0x10, kSetTag = 0x11;  // EVP_CTRL_AEAD_GET_TAG, _SET_TAG
constexpr size_t kLengthBytes = sizeof(uint32_t);

const unsigned char* chars(ByteSpan bytes) {
  return reinterpret_cast<const unsigned char*>(bytes.data());
}

[[noreturn]] void has_failed(const char* what) {
  throw Error(ErrorCode::internal, std::string("libcrypto: ") + what + " has failed");
}

}  // namespace

Digest hmac_sha256(ByteSpan key, std::initializer_list<ByteSpan> parts) {
  std::vector<std::byte> all;
  for (const ByteSpan part : parts) all.insert(all.end(), part.begin(), part.end());
  const Libcrypto& its = libcrypto();
  Digest mac{};
  if (its.HMAC(its.EVP_sha256(), key.data(), static_cast<int>(key.size()), chars(all), all.size(),
               reinterpret_cast<unsigned char*>(mac.data()), nullptr) == nullptr)
    has_failed("HMAC");
  return mac;
}

/// One block is all that is wanted, so the second step has one turn.
Key derived_key(ByteSpan secret, ByteSpan salt, std::string_view purpose) {
  constexpr std::byte kFirst{1};
  return hmac_sha256(hmac_sha256(salt, {secret}),
                     {std::as_bytes(std::span(purpose)), ByteSpan(&kFirst, 1)});
}

bool equal_in_constant_time(ByteSpan a, ByteSpan b) {
  return a.size() == b.size() && libcrypto().CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

void fill_with_random_bytes(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = ::getrandom(bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    bytes = bytes.subspan(static_cast<size_t>(checked(got, "getrandom")));
  }
}

void SealContext::Free::operator()(OpensslContext* context) const {
  libcrypto().EVP_CIPHER_CTX_free(context);
}

SealContext::SealContext(const Key& key, bool hides, bool closes)
    : context_(libcrypto().EVP_CIPHER_CTX_new()), hides_(hides), closes_(closes) {
  const Libcrypto& its = libcrypto();
  if (!context_ || its.EVP_CipherInit_ex(context_.get(), its.EVP_aes_256_gcm(), nullptr, chars(key),
                                         nullptr, closes_ ? 1 : 0) != 1)
    has_failed("EVP_CipherInit_ex");
}

void SealContext::begin(uint32_t part) {
  unsigned char number[12];  // GCM's "initialization vector"
  std::memcpy(number, &count_, sizeof count_);
  std::memcpy(number + sizeof count_, &part, sizeof part);
  ++count_;
  if (libcrypto().EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, number,
                                    closes_ ? 1 : 0) != 1)
    has_failed("EVP_CipherInit_ex");
}

/// A message that is not hidden is passed as GCM's additional data, which is authenticated only.
bool SealContext::pass(ByteSpan message, std::byte* into, uint32_t part) {
  begin(part);
  int written = 0;
  auto* const out = hides_ ? reinterpret_cast<unsigned char*>(into) : nullptr;
  if (!hides_ && into != nullptr && into != message.data())
    copy_bytes(into, message.data(), message.size());
  return libcrypto().EVP_CipherUpdate(context_.get(), out, &written, chars(message),
                                      static_cast<int>(message.size())) == 1;
}

Mark Sealer::close(ByteSpan message, std::byte* hidden, uint32_t part) {
  Mark mark{};
  unsigned char nothing[16];
  int written = 0;
  const Libcrypto& its = libcrypto();
  if (!pass(message, hidden, part) ||
      its.EVP_CipherFinal_ex(context_.get(), nothing, &written) != 1 ||
      its.EVP_CIPHER_CTX_ctrl(context_.get(), kGetTag, sizeof mark, mark.data()) != 1)
    has_failed("AES-256-GCM");
  return mark;
}

void Sealer::close(std::vector<std::byte>& frame) {
  std::byte* const message = frame.data() + kLengthBytes;
  const Mark mark = close({message, frame.size() - kLengthBytes}, message);
  frame.insert(frame.end(), mark.begin(), mark.end());
}

bool Opener::opens(ByteSpan message, std::span<const std::byte, 16> seal, std::byte* shown,
                   uint32_t part) {
  Mark mark;
  std::ranges::copy(seal, mark.begin());
  unsigned char nothing[16];
  int written = 0;
  const Libcrypto& its = libcrypto();
  return pass(message, shown, part) &&
         its.EVP_CIPHER_CTX_ctrl(context_.get(), kSetTag, sizeof mark, mark.data()) == 1 &&
         its.EVP_CipherFinal_ex(context_.get(), nothing, &written) == 1;
}

bool Opener::opens(std::span<std::byte> message_and_seal) {
  if (message_and_seal.size() < sizeof(Mark)) return false;
  const auto message = message_and_seal.first(message_and_seal.size() - sizeof(Mark));
  return opens(message, message_and_seal.last<sizeof(Mark)>(), message.data());
}

}  // namespace farandole

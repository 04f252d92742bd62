#include "base/key_pair.h"

#include "base/error.h"
#include "base/libcrypto.h"

namespace farandole {
namespace {

constexpr int kX25519 = 1034;  // NID_X25519

struct FreeContext {
  void operator()(OpensslKeyContext* context) const { libcrypto().EVP_PKEY_CTX_free(context); }
};

}  // namespace

void KeyPair::Free::operator()(OpensslKey* key) const { libcrypto().EVP_PKEY_free(key); }

KeyPair::KeyPair() {
  Key random;
  fill_with_random_bytes(random);
  own_.reset(libcrypto().EVP_PKEY_new_raw_private_key(
      kX25519, nullptr, reinterpret_cast<const unsigned char*>(random.data()), random.size()));
  if (!own_)
    throw Error(ErrorCode::resource, "this host's libcrypto makes no keys of X25519", {},
                "give the ranks a secret: FARANDOLE_SECRET_FILE");
}

Key KeyPair::public_key() const {
  Key key;
  size_t count = key.size();
  if (libcrypto().EVP_PKEY_get_raw_public_key(
          own_.get(), reinterpret_cast<unsigned char*>(key.data()), &count) != 1)
    throw Error(ErrorCode::internal, "libcrypto: EVP_PKEY_get_raw_public_key has failed");
  return key;
}

Key KeyPair::shared_with(std::span<const std::byte> other) const {
  const Libcrypto& its = libcrypto();
  const Owned peer(its.EVP_PKEY_new_raw_public_key(
      kX25519, nullptr, reinterpret_cast<const unsigned char*>(other.data()), other.size()));
  const std::unique_ptr<OpensslKeyContext, FreeContext> context(
      its.EVP_PKEY_CTX_new(own_.get(), nullptr));
  Key shared;
  size_t count = shared.size();
  if (!peer || !context || its.EVP_PKEY_derive_init(context.get()) != 1 ||
      its.EVP_PKEY_derive_set_peer(context.get(), peer.get()) != 1 ||
      its.EVP_PKEY_derive(context.get(), reinterpret_cast<unsigned char*>(shared.data()), &count) !=
          1)
    throw Error(ErrorCode::authentication, "a rank has said a public key that is none", {},
                "run the same version on every rank; where it is the same, something on the way "
                "changes bytes");
  return shared;
}

}  // namespace farandole

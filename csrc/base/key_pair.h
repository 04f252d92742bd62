// A key that two ranks share and nobody who hears them knows (X25519, RFC 7748), for ranks that
// were given no secret. Each says its public key. Who can change what they say can stand between
// them.
#pragma once

#include <memory>
#include <span>

#include "base/seal.h"

namespace farandole {

struct OpensslKey;

/// Made at random, for one meeting.
class KeyPair {
 public:
  /// As all here, throws Error(resource) where there is no libcrypto.
  KeyPair();
  Key public_key() const;
  /// The same for both, from the other's public key. Throws Error(authentication) where that is no
  /// key.
  Key shared_with(std::span<const std::byte> other) const;

 private:
  struct Free {
    void operator()(OpensslKey* key) const;
  };
  using Owned = std::unique_ptr<OpensslKey, Free>;

  Owned own_;
};

}  // namespace farandole

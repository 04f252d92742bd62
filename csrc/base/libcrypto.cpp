#include "base/libcrypto.h"

#include <dlfcn.h>

#include <mutex>
#include <optional>

#include "base/error.h"

namespace farandole {
namespace {

std::mutex mutex;
std::optional<std::string> first_place;  // guarded by it

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

/// All of them, or none. The library is never closed: its contexts live as long as connections.
std::optional<Libcrypto> in(void* library) {
  Libcrypto its{};
  if (library == nullptr) return std::nullopt;
#define FARANDOLE_FIND(name) find(library, #name, its.name)
  const bool all =
      FARANDOLE_FIND(EVP_aes_256_gcm) && FARANDOLE_FIND(EVP_CIPHER_CTX_new) &&
      FARANDOLE_FIND(EVP_CIPHER_CTX_free) && FARANDOLE_FIND(EVP_CIPHER_CTX_ctrl) &&
      FARANDOLE_FIND(EVP_CipherInit_ex) && FARANDOLE_FIND(EVP_CipherUpdate) &&
      FARANDOLE_FIND(EVP_CipherFinal_ex) && FARANDOLE_FIND(EVP_sha256) && FARANDOLE_FIND(HMAC) &&
      FARANDOLE_FIND(CRYPTO_memcmp) && FARANDOLE_FIND(EVP_PKEY_new_raw_private_key) &&
      FARANDOLE_FIND(EVP_PKEY_new_raw_public_key) && FARANDOLE_FIND(EVP_PKEY_get_raw_public_key) &&
      FARANDOLE_FIND(EVP_PKEY_free) && FARANDOLE_FIND(EVP_PKEY_CTX_new) &&
      FARANDOLE_FIND(EVP_PKEY_CTX_free) && FARANDOLE_FIND(EVP_PKEY_derive_init) &&
      FARANDOLE_FIND(EVP_PKEY_derive_set_peer) && FARANDOLE_FIND(EVP_PKEY_derive);
#undef FARANDOLE_FIND
  return all ? std::optional(its) : std::nullopt;
}

Libcrypto looked_for() {
  const std::lock_guard lock(mutex);
  if (first_place) {
    const char* const file = first_place->empty() ? nullptr : first_place->c_str();
    if (const auto its = in(::dlopen(file, RTLD_LAZY | RTLD_NOLOAD))) return *its;
  }
  for (const char* const file : {"libcrypto.so.3", "libcrypto.so.1.1"})
    if (const auto its = in(::dlopen(file, RTLD_LAZY | RTLD_LOCAL))) return *its;
  throw Error(ErrorCode::resource, "OpenSSL's libcrypto is not found on this host", {},
              "install OpenSSL 1.1.1 or newer (Debian: libssl3), or use a Python whose hashlib has "
              "it; ranks prove by it on connections who they are");
}

}  // namespace

void look_for_libcrypto_in(const std::string& module) {
  const std::lock_guard lock(mutex);
  first_place = module;
}

const Libcrypto& libcrypto() {
  static const Libcrypto its = looked_for();  // again, where it threw
  return its;
}

}  // namespace farandole

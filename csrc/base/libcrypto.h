// The functions that are called of OpenSSL's libcrypto, 1.1.1 or newer. No OpenSSL is needed to
// compile this: they are found in the library that Python's own _hashlib is linked to, else in the
// system's. So an update of Python's OpenSSL updates this one.
#pragma once

#include <cstddef>
#include <string>

namespace farandole {

/// Opaque, as OpenSSL has them.
struct OpensslCipher;
struct OpensslContext;
struct OpensslDigest;
struct OpensslKey;
struct OpensslKeyContext;

/// By OpenSSL's own names and signatures (EVP_EncryptInit(3), HMAC(3), CRYPTO_memcmp(3),
/// EVP_PKEY_new(3), EVP_PKEY_derive(3)).
struct Libcrypto {
  const OpensslCipher* (*EVP_aes_256_gcm)();
  OpensslContext* (*EVP_CIPHER_CTX_new)();
  void (*EVP_CIPHER_CTX_free)(OpensslContext*);
  int (*EVP_CIPHER_CTX_ctrl)(OpensslContext*, int type, int number, void* pointer);
  int (*EVP_CipherInit_ex)(OpensslContext*, const OpensslCipher*, void* engine,
                           const unsigned char* key, const unsigned char* iv, int encrypts);
  int (*EVP_CipherUpdate)(OpensslContext*, unsigned char* out, int* written,
                          const unsigned char* in, int count);
  int (*EVP_CipherFinal_ex)(OpensslContext*, unsigned char* out, int* written);
  const OpensslDigest* (*EVP_sha256)();
  unsigned char* (*HMAC)(const OpensslDigest*, const void* key, int key_bytes,
                         const unsigned char* data, size_t count, unsigned char* mac,
                         unsigned* mac_bytes);
  int (*CRYPTO_memcmp)(const void* a, const void* b, size_t count);
  OpensslKey* (*EVP_PKEY_new_raw_private_key)(int type, void* engine, const unsigned char* key,
                                              size_t count);
  OpensslKey* (*EVP_PKEY_new_raw_public_key)(int type, void* engine, const unsigned char* key,
                                             size_t count);
  int (*EVP_PKEY_get_raw_public_key)(const OpensslKey*, unsigned char* key, size_t* count);
  void (*EVP_PKEY_free)(OpensslKey*);
  OpensslKeyContext* (*EVP_PKEY_CTX_new)(OpensslKey*, void* engine);
  void (*EVP_PKEY_CTX_free)(OpensslKeyContext*);
  int (*EVP_PKEY_derive_init)(OpensslKeyContext*);
  int (*EVP_PKEY_derive_set_peer)(OpensslKeyContext*, OpensslKey*);
  int (*EVP_PKEY_derive)(OpensslKeyContext*, unsigned char* shared, size_t* count);
};

/// Before libcrypto() is first called: a library that is loaded, and linked to it. Empty: the
/// program itself is.
void look_for_libcrypto_in(const std::string& module);

/// Throws Error(resource), which says what to install, where there is none.
const Libcrypto& libcrypto();

}  // namespace farandole

// Pages of the host, as a segment has them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <span>

namespace testing {

class HostPages {
 public:
  explicit HostPages(size_t bytes)
      : bytes_(bytes),
        at_(static_cast<std::byte*>(
            ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~HostPages() { ::munmap(at_, bytes_); }
  HostPages(const HostPages&) = delete;
  HostPages& operator=(const HostPages&) = delete;
  std::span<std::byte> all() const { return {at_, bytes_}; }

 private:
  size_t bytes_;
  std::byte* at_;
};

}  // namespace testing

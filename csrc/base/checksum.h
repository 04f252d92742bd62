// A checksum of memory: whether two ranks have the same bits, without sending them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace farandole {

/// The same on every rank for the same bytes, wherever they lie. Memory that differs in one
/// aligned word alone always has another one; else 64 bits leave what chance leaves.
uint64_t checksum(std::span<const std::byte> bytes);

}  // namespace farandole

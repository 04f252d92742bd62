#include "cases.h"

#include <limits>

#include "base/half.h"

namespace farandole::cuda {
namespace {

template <typename T>
void append(Bytes& bytes, T value) {
  const auto* begin = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), begin, begin + sizeof value);
}

template <FloatFormat format>
void append_float(Bytes& out, uint64_t bits) {
  append(out, static_cast<BitsOf<format>>(bits));
}

template <FloatFormat format>
void append_special_floats(Bytes& out) {
  const uint64_t one = convert<kFloat32, format>(bits_of(1.0F));
  const uint64_t infinity = format.infinity(), least_normal = uint64_t{1} << format.mantissa;
  for (const uint64_t sign : {uint64_t{0}, format.sign()})
    for (const uint64_t magnitude :
         {uint64_t{0}, uint64_t{1}, least_normal - 1, least_normal, least_normal + 1, one, one + 1,
          infinity - 1, infinity, infinity + 1, format.quiet_nan(), format.quiet_nan() + 1})
      append_float<format>(out, sign | magnitude);
}

template <typename T>
void append_specials(Bytes& out) {
  if constexpr (FloatingElement<T>) {
    append_special_floats<kFormatOf<T>>(out);
  } else if constexpr (std::is_integral_v<T>) {
    using Limits = std::numeric_limits<T>;
    for (const T value : {T{0}, T{1}, T{2}, T{100}, static_cast<T>(-1), static_cast<T>(-2),
                          Limits::max(), Limits::lowest(), static_cast<T>(Limits::max() / 2 + 1)})
      append(out, value);
  } else {
    for (const int value : {0, 1, 2, 128, 255}) append(out, static_cast<uint8_t>(value));
  }
}

/// Numbers for which sums neither overflow nor lose everything: order shows in their last bits.
template <typename T>
void append_number(Bytes& out, std::mt19937_64& random) {
  if constexpr (FloatingElement<T>) {
    const double value = std::uniform_real_distribution<>(-4, 4)(random);
    append_float<kFormatOf<T>>(out, convert<kFloat64, kFormatOf<T>>(bits_of(value)));
  } else if constexpr (std::is_integral_v<T>) {
    append(out, static_cast<T>(random() % 100));
  } else {
    append(out, static_cast<uint8_t>(random() % 2));
  }
}

constexpr auto kAppendSpecials = by_dtype([]<typename T>(const DTypeOf<T>&) {
  return static_cast<void (*)(Bytes&)>(append_specials<T>);
});
constexpr auto kAppendNumber = by_dtype([]<typename T>(const DTypeOf<T>&) {
  return static_cast<void (*)(Bytes&, std::mt19937_64&)>(append_number<T>);
});

}  // namespace

Array::Array(DType dtype, size_t count, size_t offset)
    : bytes_(count * size_of(dtype)),
      memory_(new std::byte[bytes_ + 3 * kMargin + offset * size_of(dtype)]),
      memory_bytes_(bytes_ + 3 * kMargin + offset * size_of(dtype)) {
  std::memset(memory_.get(), static_cast<int>(kMark), memory_bytes_);
  const auto address = reinterpret_cast<uintptr_t>(memory_.get());
  begin_ = memory_.get() + (kMargin - address % kMargin) + offset * size_of(dtype);
}

Array::Array(DType dtype, const Bytes& bytes, size_t offset)
    : Array(dtype, bytes.size() / size_of(dtype), offset) {
  fill(bytes);
}

bool Array::surroundings_are_intact() const {
  const auto is_mark = [](std::byte b) { return b == kMark; };
  return std::all_of(memory_.get(), begin_, is_mark) &&
         std::all_of(begin_ + bytes_, memory_.get() + memory_bytes_, is_mark);
}

Bytes specials(DType dtype) {
  Bytes out;
  kAppendSpecials[index(dtype)](out);
  return out;
}

Bytes some_elements(DType dtype, size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  const Bytes special = specials(dtype);
  const size_t size = size_of(dtype), kinds = special.size() / size;
  Bytes out;
  for (size_t i = 0; i < count; ++i) {
    switch (random() % 8) {
      case 0: {
        const auto* from = special.data() + random() % kinds * size;
        out.insert(out.end(), from, from + size);
        break;
      }
      case 1: {
        const uint64_t bits = random();
        const auto* from = reinterpret_cast<const std::byte*>(&bits);
        out.insert(out.end(), from, from + size);
        break;
      }
      default:
        kAppendNumber[index(dtype)](out, random);
    }
  }
  return out;
}

Bytes folded(std::span<const Bytes> leaves, const Folding& folding) {
  std::vector<const std::byte*> sources;
  for (const Bytes& leaf : leaves) sources.push_back(leaf.data());
  Bytes out(leaves[0].size());
  fold_canonical(out.data(), sources, out.size() / size_of(folding.dtype), folding.dtype,
                 folding.op, folding.scales);
  return out;
}

Bytes scaled(const Bytes& elements, DType dtype, const Scale& by) {
  Bytes out(elements.size());
  scale(out.data(), elements.data(), out.size() / size_of(dtype), dtype, by);
  return out;
}

std::vector<void*> writable(std::span<const Array> arrays) {
  std::vector<void*> all;
  for (const Array& array : arrays) all.push_back(array.data());
  return all;
}
std::vector<const void*> addresses(std::span<const Array> arrays) {
  std::vector<const void*> all;
  for (const Array& array : arrays) all.push_back(array.data());
  return all;
}

Ranks::Ranks(uint32_t size, uint32_t first_epoch) : size_(size) {
  for (uint32_t r = 0; r < size; ++r) {
    Flags& flags = *flags_.emplace_back(std::make_unique<Flags>());
    std::ranges::fill(flags.epoch, first_epoch);
    for (auto& channel : flags.arrived) std::ranges::fill(channel, first_epoch);
  }
}

Peers Ranks::peers(uint32_t rank) {
  Peers peers{.rank = rank, .size = size_, .abort = &abort_};
  for (uint32_t r = 0; r < size_; ++r) peers.flags[r] = flags_[r].get();
  return peers;
}

std::vector<void*> Ranks::mailboxes() {
  std::vector<void*> all;
  while (mailboxes_.size() < size_)
    mailboxes_.push_back(
        std::make_unique_for_overwrite<Pack[]>(mailbox_bytes(size_) / sizeof(Pack)));
  for (const auto& mailbox : mailboxes_) all.push_back(mailbox.get());
  return all;
}

}  // namespace farandole::cuda

// Every function of fold.h on bytes, for one named instruction set.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/bindings/bind.h"
#include "core/bindings/kernels.h"
#include "fold/cast.h"
#include "fold/fold.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace farandole {
namespace {

[[noreturn]] void refuse(const std::string& verdict) {
  throw Error(ErrorCode::invalid_argument, verdict);
}

template <typename T>
T named(const std::optional<T>& value, std::string_view name) {
  if (!value) refuse("unknown name '" + std::string(name) + "'");
  return *value;
}

DType dtype_of(std::string_view name) { return named(dtype_named(name), name); }
ReduceOp op_of(std::string_view name) { return named(reduce_op_named(name), name); }

/// Bytes at a chosen distance from an aligned address, between guards that no fold may touch.
class Guarded {
 public:
  Guarded(size_t size, size_t misaligned)
      : size_(size),
        misaligned_(misaligned),
        memory_(static_cast<std::byte*>(
            std::aligned_alloc(64, (size + misaligned + kGuard + 63) / 64 * 64))) {
    if (memory_ == nullptr) throw std::bad_alloc();
    std::memset(memory_.get(), kFill, size + misaligned + kGuard);
  }
  Guarded(std::string_view from, size_t misaligned) : Guarded(from.size(), misaligned) {
    if (!from.empty()) std::memcpy(data(), from.data(), from.size());
  }

  std::byte* data() { return memory_.get() + misaligned_; }

  /// The content, once nothing beside it has changed.
  py::bytes content() {
    const auto untouched = [](std::byte b) { return b == std::byte{kFill}; };
    if (!std::all_of(memory_.get(), data(), untouched) ||
        !std::all_of(data() + size_, data() + size_ + kGuard, untouched))
      refuse("a fold wrote beside its output");
    return {reinterpret_cast<const char*>(data()), size_};
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  static constexpr size_t kGuard = 64;
  static constexpr unsigned char kFill = 0xa5;
  size_t size_, misaligned_;
  std::unique_ptr<std::byte, Free> memory_;
};

py::bytes py_fold(std::string_view dtype, std::string_view op, const py::buffer& lower,
                  const py::buffer& upper, std::string_view isa, std::string_view out,
                  size_t misaligned) {
  const DType type = dtype_of(dtype);
  const FoldFunction function =
      kernels_named(isa).fold[static_cast<size_t>(type)][static_cast<size_t>(op_of(op))];
  if (function == nullptr) refuse(std::string(op) + " has no meaning on " + std::string(dtype));
  const py::buffer_info lower_info = lower.request(), upper_info = upper.request();
  if (view(lower_info).size() != view(upper_info).size()) refuse("operands differ in size");
  Guarded a(view(lower_info), misaligned), b(view(upper_info), misaligned * 2);
  Guarded apart(view(lower_info).size(), misaligned * 3);
  Guarded& result = out == "lower" ? a : out == "upper" ? b : apart;
  function(result.data(), a.data(), b.data(), view(lower_info).size() / size_of(type));
  return result.content();
}

Ahead ahead_of(std::string_view name) {
  if (name == "operands") return Ahead::operands;
  if (name == "ownership") return Ahead::ownership;
  if (name == "nothing") return Ahead::nothing;
  refuse("nothing ahead is called " + std::string(name));
}

/// lower + upper, times factor, to `outputs` (1 or 2) places.
py::bytes py_sum(std::string_view dtype, const py::buffer& lower, const py::buffer& upper,
                 std::string_view isa, const std::optional<double>& factor, int outputs,
                 std::string_view ahead, size_t misaligned) {
  const DType type = dtype_of(dtype);
  const SumFunction function = kernels_named(isa).sum[static_cast<size_t>(type)];
  if (function == nullptr || (factor && row(type).kind == DTypeKind::integer))
    refuse("no sum of these ends in one pass");
  const std::string_view low = view(lower.request()), high = view(upper.request());
  if (low.size() != high.size()) refuse("operands differ in size");
  Guarded a(low, misaligned), b(high, misaligned * 2), second(low.size(), misaligned * 3);
  const Factor by = factor_of(factor.value_or(1));
  function({b.data(), outputs == 2 ? second.data() : nullptr, a.data(), b.data(), ahead_of(ahead)},
           low.size() / size_of(type), factor ? &by : nullptr);
  const py::bytes result = b.content(), other = second.content();
  if (outputs == 2 && !other.equal(result)) refuse("destinations differ");
  return result;
}

py::bytes py_fold_canonical(std::string_view dtype, std::string_view op,
                            const std::vector<py::buffer>& sources, double prescale,
                            double postscale, const std::vector<int>& into) {
  const DType type = dtype_of(dtype);
  std::vector<Guarded> leaves;
  for (const py::buffer& source : sources) leaves.emplace_back(view(source.request()), 0);
  if (leaves.empty()) refuse("no sources");
  const size_t bytes = view(sources[0].request()).size();
  std::vector<const std::byte*> pointers;
  for (Guarded& leaf : leaves) pointers.push_back(leaf.data());

  // Into the leaves named, all of them, or else into memory of its own.
  Guarded apart(bytes, 0);
  std::vector<std::byte*> destinations;
  for (int leaf : into) destinations.push_back(leaves.at(static_cast<size_t>(leaf)).data());
  if (into.empty()) destinations.push_back(apart.data());
  const Scales scales =
      scales_for(type, op_of(op), prescale, postscale, static_cast<int>(sources.size()));
  fold_canonical_to(destinations, pointers, bytes / size_of(type), type, op_of(op), scales);
  for (const std::byte* other : destinations)
    if (bytes > 0 && std::memcmp(other, destinations[0], bytes) != 0) refuse("destinations differ");
  return into.empty() ? apart.content() : leaves.at(static_cast<size_t>(into[0])).content();
}

py::bytes py_fold_step(std::string_view dtype, std::string_view op, const py::buffer& arrived,
                       std::string_view side, bool arrived_is_leaf, const py::buffer& held,
                       bool held_is_leaf, bool finish, double prescale, double postscale,
                       int size) {
  const DType type = dtype_of(dtype);
  Guarded a(view(arrived.request()), 0), h(view(held.request()), 0);
  const size_t bytes = view(held.request()).size();
  fold_step(h.data(), a.data(), side == "lower" ? Side::lower : Side::upper, arrived_is_leaf,
            h.data(), held_is_leaf, finish, bytes / size_of(type), type, op_of(op),
            scales_for(type, op_of(op), prescale, postscale, size));
  return h.content();
}

py::bytes py_store_step(std::string_view dtype, std::string_view op, const py::buffer& arrived,
                        bool arrived_is_leaf, bool finish, double prescale, double postscale,
                        int size) {
  const DType type = dtype_of(dtype);
  Guarded a(view(arrived.request()), 0);
  const size_t bytes = view(arrived.request()).size();
  Guarded out(bytes, 0);
  store_step(out.data(), a.data(), arrived_is_leaf, finish, bytes / size_of(type), type,
             scales_for(type, op_of(op), prescale, postscale, size));
  return out.content();
}

py::bytes py_scale(std::string_view dtype, const py::buffer& in, double factor, int64_t divide,
                   const std::optional<std::string>& isa) {
  const DType type = dtype_of(dtype);
  const py::buffer_info info = in.request();
  Guarded buffer(view(info), 0);
  const size_t count = view(info).size() / size_of(type);
  if (!isa) {
    scale(buffer.data(), buffer.data(), count, type, {factor, divide});
  } else {
    const FloatScaleFunction function = kernels_named(*isa).scale[static_cast<size_t>(type)];
    if (function == nullptr) refuse("only floats are scaled by vectors");
    function(buffer.data(), buffer.data(), count, factor_of(factor));
  }
  return buffer.content();
}

py::bytes py_cast(std::string_view out_dtype, const py::buffer& in, std::string_view in_dtype,
                  const std::optional<std::string>& isa) {
  const DType from = dtype_of(in_dtype), to = dtype_of(out_dtype);
  const py::buffer_info info = in.request();
  Guarded source(view(info), 1);
  const size_t count = view(info).size() / size_of(from);
  Guarded out(count * size_of(to), 1);
  if (!isa) {
    cast(out.data(), to, source.data(), from, count);
  } else {
    const Kernels& kernels = kernels_named(*isa);
    const CastFunction function = to == DType::float32 ? kernels.widen[static_cast<size_t>(from)]
                                                       : kernels.narrow[static_cast<size_t>(to)];
    if (function == nullptr) refuse("only halves are cast by vectors");
    function(out.data(), source.data(), count);
  }
  return out.content();
}

/// Sets or clears the calling thread's flush-to-zero mode, as frameworks do; false where this
/// processor's mode is unknown here.
bool flush_to_zero(bool on) {
#if defined(__x86_64__)
  constexpr unsigned kFlush = 0x8040;  // FTZ, DAZ
  _mm_setcsr(on ? _mm_getcsr() | kFlush : _mm_getcsr() & ~kFlush);
  return true;
#elif defined(__aarch64__)
  constexpr uint64_t kFlush = uint64_t{1} << 24;  // FZ
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  control = on ? control | kFlush : control & ~kFlush;
  asm volatile("msr fpcr, %0" : : "r"(control));
  return true;
#else
  return !on;
#endif
}

}  // namespace

void bind_folds(py::module_& testing) {
  using namespace py::literals;
  testing.def("fold", &py_fold, "dtype"_a, "op"_a, "lower"_a, "upper"_a, "isa"_a, py::kw_only(),
              "out"_a = "apart", "misaligned"_a = 0,
              "lower ⊕ upper, written to 'lower', 'upper' or apart, at misaligned addresses.");
  testing.def("sum", &py_sum, "dtype"_a, "lower"_a, "upper"_a, "isa"_a, py::kw_only(),
              "factor"_a = py::none(), "outputs"_a = 1, "ahead"_a = "operands", "misaligned"_a = 0,
              "The last fold of a sum: in place of upper, and to a second place if there are two.");
  testing.def("fold_canonical", &py_fold_canonical, "dtype"_a, "op"_a, "sources"_a, py::kw_only(),
              "prescale"_a = 1.0, "postscale"_a = 1.0, "into"_a = std::vector<int>{},
              "All sources in canonical order, stored to each source named by `into` or apart.");
  testing.def("fold_step", &py_fold_step, "dtype"_a, "op"_a, "arrived"_a, "side"_a,
              "arrived_is_leaf"_a, "held"_a, "held_is_leaf"_a, "finish"_a, py::kw_only(),
              "prescale"_a = 1.0, "postscale"_a = 1.0, "size"_a = 2,
              "One fold of a schedule, in place of what is held.");
  testing.def("store_step", &py_store_step, "dtype"_a, "op"_a, "arrived"_a, "arrived_is_leaf"_a,
              "finish"_a, py::kw_only(), "prescale"_a = 1.0, "postscale"_a = 1.0, "size"_a = 2,
              "One store of a schedule.");
  testing.def("scale", &py_scale, "dtype"_a, "buffer"_a, "factor"_a, "divide"_a = 1,
              "isa"_a = py::none(), "Every element times factor, integers then over divide.");
  testing.def("cast", &py_cast, "out_dtype"_a, "buffer"_a, "in_dtype"_a, "isa"_a = py::none(),
              "Every element as another floating-point type.");
  testing.def("flush_to_zero", &flush_to_zero, "on"_a,
              "Flush subnormals in the calling thread; False where this is not possible.");
}

}  // namespace farandole

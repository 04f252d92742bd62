// Runs kernels on the host: their own source, compiled by the host's compiler. Threads of a block
// are fibers that change over at barriers and in spins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

namespace farandole::cuda {

/// A kernel as compiled for the host. Its one parameter is a struct of parameters.h.
struct Kernel {
  const char* name;
  std::size_t parameter_bytes;
  void (*body)(const void* parameters);
};

/// Every kernel of csrc/cuda/kernels, by the names that the device's module has.
std::span<const Kernel> kernels();
/// nullptr when there is none of that name.
const Kernel* kernel_named(std::string_view name);

struct Dim {
  std::uint32_t x = 1, y = 1, z = 1;
};

struct Launch {
  const Kernel* kernel = nullptr;
  Dim grid, block;                    // kernels are one-dimensional: y and z are 1
  std::vector<std::byte> parameters;  // parameter_bytes of them
};

/// Runs a launch to its end, in the calling thread. All its blocks are resident. Any number of
/// threads and processes may be in here, each with a launch of its own: where a kernel only spins,
/// the processor is given to them. Throws std::logic_error when the launch makes no sense, or when
/// its threads wait for each other at a barrier that some have left behind.
void run(const Launch& launch);

/// The same, with every block in a thread of its own.
void run_in_threads(const Launch& launch);

/// Launches of several ranks together, in the calling thread, by an order of turns that `seed`
/// decides. Throws std::runtime_error when all of them wait and nothing can change.
void run_together(std::span<const Launch> launches, std::uint64_t seed);

/// Launches of one rank, each behind the one before it.
using Stream = std::vector<Launch>;
/// The same for streams, which know nothing of each other: for ThreadSanitizer, too, what a launch
/// did comes before the next one of its stream, and before nothing else.
void run_together(std::span<const Stream> streams, std::uint64_t seed);

/// Work of the host between launches of a stream. `work` outlives the run.
Launch host_step(const std::function<void()>& work);

/// A launch of `kernel` with `parameters`, by value.
template <typename Parameters>
Launch launch_of(std::string_view kernel, const Parameters& parameters, std::uint32_t blocks,
                 std::uint32_t threads) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&parameters);
  return {kernel_named(kernel), {blocks}, {threads}, {bytes, bytes + sizeof parameters}};
}

}  // namespace farandole::cuda

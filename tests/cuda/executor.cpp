#include "executor.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "cuda/kernels/device.h"
#include "fiber.h"

namespace farandole::cuda {
namespace {

enum class State : std::uint8_t { ready, at_barrier, spins, ended };

struct Block;

struct Thread {
  Block* block;
  host::Indices indices;
  std::size_t place;  // among those that have not ended
  State state = State::ready;
  // How much had changed when it began to look, now and before it last found nothing to do.
  std::uint64_t looks_since = 0, found_nothing_since = 0;
  std::unique_ptr<Fiber> fiber{};
};

/// For ThreadSanitizer: where a launch begins (behind another one of its stream) and ends.
struct Bounds {
  char* begin;
  char* end;
};

struct Block {
  const Launch* launch;
  std::size_t stream;
  Bounds bounds;
  std::vector<Thread*> threads{};
  std::size_t ended = 0;
  std::size_t waiting = 0;  // at the barrier
  std::uint32_t votes = 0;  // of those said true
  std::uint32_t outcome = 0;
  std::uint32_t word = 0;  // shared memory: as much as kernels use
};

void check(const Launch& launch) {
  const auto refuse = [](const std::string& why) { throw std::logic_error("launch: " + why); };
  if (launch.kernel == nullptr) refuse("there is no such kernel");
  if (launch.parameters.size() != launch.kernel->parameter_bytes)
    refuse(std::string(launch.kernel->name) + " takes " +
           std::to_string(launch.kernel->parameter_bytes) + " bytes, not " +
           std::to_string(launch.parameters.size()));
  if (launch.grid.x == 0 || launch.grid.y != 1 || launch.grid.z != 1) refuse("grid");
  if (launch.block.x == 0 || launch.block.x > 1024 || launch.block.y != 1 || launch.block.z != 1)
    refuse("block");
}

/// Runs fibers in turn; `seed` makes turns random and short.
class Executor {
 public:
  explicit Executor(std::size_t streams) : streams_(streams) {
    for (Stream& stream : streams_) stream.bounds = {&all_.begin, &all_.begin};
  }

  void seed(std::uint64_t seed) {
    random_ = seed;
    seeded_ = true;
  }

  void start_block(const Launch& launch, std::size_t stream, std::uint32_t index) {
    Block& block = *blocks_.emplace_back(
        std::make_unique<Block>(Block{&launch, stream, streams_[stream].bounds}));
    for (std::uint32_t t = 0; t < launch.block.x; ++t) {
      const host::Indices indices{t, launch.block.x, index, launch.grid.x};
      block.threads.push_back(
          threads_.emplace_back(std::make_unique<Thread>(Thread{&block, indices, threads_.size()}))
              .get());
    }
    running_blocks_.push_back(&block);
    streams_[stream].threads += launch.block.x;
  }
  void start(const Launch& launch, std::size_t stream) {
    Bounds& bounds = streams_[stream].bounds;
    bounds = {bounds.end, marks_.emplace_back(std::make_unique<char>()).get()};
    for (std::uint32_t b = 0; b < launch.grid.x; ++b) start_block(launch, stream, b);
  }

  /// To the end of all streams; `next` may start what follows in a stream that has nothing left.
  template <typename Next>
  void run(Next next) {
    Executor* const outer = current_;
    current_ = this;
    release(&all_.begin);
    try {
      while (!threads_.empty()) seeded_ ? turn_of_anyone(next) : turn_of_each(next);
    } catch (...) {
      acquire(&all_.end);
      current_ = outer;
      throw;
    }
    acquire(&all_.end);
    current_ = outer;
  }

  // From fibers.
  static Executor& current() { return *current_; }
  const Thread& thread() const { return *running_; }
  void pause(State state) {
    running_->state = state;
    running_->fiber->suspend();
  }
  void interleave() {
    if (seeded_ && random() % 4 == 0) pause(State::ready);
  }
  void changed() { ++changes_; }
  void spins() {
    Thread& me = *running_;
    me.found_nothing_since = me.looks_since;
    pause(State::spins);
    me.looks_since = changes_;
  }
  std::uint32_t barrier(bool mine) {
    Block& block = *running_->block;
    release(&block);
    block.votes += mine ? 1 : 0;
    if (++block.waiting < block.threads.size()) {
      pause(State::at_barrier);
    } else {
      block.outcome = block.votes;
      block.votes = 0;
      block.waiting = 0;
      for (Thread* t : block.threads) t->state = State::ready;
      changed();
      interleave();
    }
    acquire(&block);
    return block.outcome;
  }

  std::uint32_t broadcast(std::uint32_t mine) {
    barrier(true);
    if (running_->indices.thread == 0) running_->block->word = mine;
    barrier(true);
    return running_->block->word;
  }

 private:
  struct Stream {
    std::size_t threads = 0;  // that have not ended
    Bounds bounds{};          // of its latest launch
  };

  static void body(void* argument) {
    auto& self = *static_cast<Executor*>(argument);
    Thread& me = *self.running_;
    acquire(me.block->bounds.begin);
    me.block->launch->kernel->body(me.block->launch->parameters.data());
    release(me.block->bounds.end);
    release(&self.all_.end);
    me.state = State::ended;
    me.fiber->finish();
  }

  void resume(Thread& thread) {
    running_ = &thread;
    if (!thread.fiber) thread.fiber = std::make_unique<Fiber>(body, this);
    thread.fiber->resume();
    running_ = nullptr;
  }

  /// Forgets a thread that has ended; whether its stream has nothing left.
  bool leave(Thread& thread) {
    thread.fiber.reset();
    ++thread.block->ended;
    changed();
    if (thread.block->waiting > 0)
      throw std::logic_error(std::string(thread.block->launch->kernel->name) +
                             ": a thread has ended while others wait for it at a barrier");
    Stream& stream = streams_[thread.block->stream];
    threads_.back()->place = thread.place;
    std::swap(threads_[thread.place], threads_.back());
    ended_.push_back(std::move(threads_.back()));
    threads_.pop_back();
    return --stream.threads == 0;
  }

  template <typename Next>
  void turn(Thread& thread, Next next) {
    resume(thread);
    if (thread.state == State::ended && leave(thread)) next(thread.block->stream);
  }

  /// SplitMix64. The standard's generators may be shared with code that a sanitizer looks at.
  std::uint64_t random() {
    std::uint64_t z = random_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  bool is_stuck(const Thread& t) const {
    return t.state == State::at_barrier ||
           (t.state == State::spins && t.found_nothing_since == changes_);
  }

  /// Until all its threads wait for others or have ended. Block by block, few stacks are in use.
  template <typename Next>
  void turns_of(Block& block, Next next) {
    for (Thread* const thread : block.threads)
      if (thread->state == State::spins) turn(*thread, next);
    for (bool ran = true; ran;) {
      ran = false;
      for (Thread* const thread : block.threads)
        if (thread->state == State::ready) {
          turn(*thread, next);
          ran = true;
        }
    }
  }

  template <typename Next>
  void turn_of_each(Next next) {
    const std::uint64_t before = changes_;
    for (std::size_t b = 0; b < running_blocks_.size(); ++b) turns_of(*running_blocks_[b], next);
    std::erase_if(running_blocks_, [](const Block* b) { return b->ended == b->threads.size(); });
    if (before != changes_ || threads_.empty()) return void(idle_ = 0);
    if (std::ranges::none_of(threads_, [](auto& t) { return t->state == State::spins; }))
      throw std::logic_error("threads of a block wait at a barrier for good");
    // They wait for another thread or process.
    if (++idle_ < kIdleTurns)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

  template <typename Next>
  void turn_of_anyone(Next next) {
    const std::size_t from = random() % threads_.size();
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      Thread& thread = *threads_[(from + i) % threads_.size()];
      if (!is_stuck(thread)) return turn(thread, next);
    }
    throw std::runtime_error("deadlock: all threads of all ranks wait, and nothing can change");
  }

  static constexpr int kIdleTurns = 64;
  static thread_local Executor* current_;

  std::vector<Stream> streams_;
  std::vector<std::unique_ptr<char>> marks_;
  struct {
    char begin = 0, end = 0;
  } all_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Block*> running_blocks_;            // turn_of_each() alone forgets those that ended
  std::vector<std::unique_ptr<Thread>> threads_;  // those that have not ended
  std::vector<std::unique_ptr<Thread>> ended_;
  Thread* running_ = nullptr;
  std::uint64_t changes_ = 1;
  int idle_ = 0;
  bool seeded_ = false;
  std::uint64_t random_ = 0;
};

thread_local Executor* Executor::current_ = nullptr;

void nothing_follows(std::size_t) {}

}  // namespace

const Kernel* kernel_named(std::string_view name) {
  for (const Kernel& kernel : kernels())
    if (kernel.name == name) return &kernel;
  return nullptr;
}

void run(const Launch& launch) {
  check(launch);
  Executor executor(1);
  executor.start(launch, 0);
  executor.run(nothing_follows);
}

void run_in_threads(const Launch& launch) {
  check(launch);
  std::exception_ptr first;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (std::uint32_t b = 0; b < launch.grid.x; ++b)
    threads.emplace_back([&, b] {
      try {
        Executor executor(1);
        executor.start_block(launch, 0, b);
        executor.run(nothing_follows);
      } catch (...) {
        const std::lock_guard lock(mutex);
        first = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

void run_together(std::span<const Stream> streams, std::uint64_t seed) {
  for (const Stream& stream : streams)
    for (const Launch& launch : stream) check(launch);
  Executor executor(streams.size());
  executor.seed(seed);
  std::vector<std::size_t> at(streams.size(), 0);
  const auto next = [&](std::size_t stream) {
    if (at[stream] < streams[stream].size()) executor.start(streams[stream][at[stream]++], stream);
  };
  for (std::size_t s = 0; s < streams.size(); ++s) next(s);
  executor.run(next);
}

void run_together(std::span<const Launch> launches, std::uint64_t seed) {
  std::vector<Stream> streams;
  for (const Launch& launch : launches) streams.push_back({launch});
  run_together(streams, seed);
}

Launch host_step(const std::function<void()>& work) {
  using Work = const std::function<void()>*;
  static constexpr Kernel kKernel{"host_step", sizeof(Work), [](const void* parameters) {
                                    Work to_do;
                                    std::memcpy(&to_do, parameters, sizeof to_do);
                                    (*to_do)();
                                  }};
  const Work pointer = &work;
  Launch launch{&kKernel, {}, {}, std::vector<std::byte>(sizeof pointer)};
  std::memcpy(launch.parameters.data(), &pointer, sizeof pointer);
  return launch;
}

namespace host {
Indices indices() { return Executor::current().thread().indices; }
uint32_t barrier(bool mine) { return Executor::current().barrier(mine); }
void spins() { Executor::current().spins(); }
void interleave() { Executor::current().interleave(); }
void changed() { Executor::current().changed(); }
uint32_t broadcast(uint32_t mine) { return Executor::current().broadcast(mine); }
}  // namespace host

}  // namespace farandole::cuda

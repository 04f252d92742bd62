// The fake driver as tests see it: built beside this program, opened by its path.
#pragma once

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/fd.h"
#include "check.h"
#include "cuda/driver/context.h"
#include "cuda/driver/stream.h"
#include "cuda/fake_libcuda/control.h"
#include "cuda/fake_libcuda/test_kernels.h"

struct CUgraph_st;

namespace testing {

inline std::string fake_driver() { return FARANDOLE_FAKE_LIBCUDA; }

inline const farandole::cuda::FakeControl& fake() {
  static const auto* const control = [] {
    void* const library = ::dlopen(fake_driver().c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(::dlerror());
    const auto get = reinterpret_cast<const farandole::cuda::FakeControl* (*)()>(
        ::dlsym(library, "fake_cuda_control"));
    return get();
  }();
  return *control;
}

/// A fake driver as at the beginning of a process; at the end nothing may be left or done wrong.
class FreshDriver {
 public:
  FreshDriver() { fake().reset(); }
  ~FreshDriver() {
    CHECK_EQUAL(std::string(fake().misuse()), expected_misuse);
    CHECK_EQUAL(std::string(fake().alive()), std::string());
  }
  FreshDriver(const FreshDriver&) = delete;
  FreshDriver& operator=(const FreshDriver&) = delete;

  std::shared_ptr<const farandole::cuda::Driver> open() const {
    return farandole::cuda::Driver::open(fake_driver());
  }
  std::shared_ptr<const farandole::cuda::DeviceContext> context(int device = 0) const {
    return farandole::cuda::DeviceContext::retain(open(), device);
  }
  /// The context that is current on this thread.
  farandole::cuda::ContextHandle current() const {
    farandole::cuda::ContextHandle handle = nullptr;
    library_.get_current(&handle);
    return handle;
  }

  std::string expected_misuse;

 private:
  struct Library {
    int (*get_current)(farandole::cuda::ContextHandle*) =
        reinterpret_cast<int (*)(farandole::cuda::ContextHandle*)>(
            ::dlsym(::dlopen(fake_driver().c_str(), RTLD_NOW | RTLD_LOCAL), "cuCtxGetCurrent"));
  } library_;
};

/// A stream that is being captured into a graph.
class Capture {
 public:
  enum Mode { global, thread_local_, relaxed };

  Capture(std::shared_ptr<const farandole::cuda::DeviceContext> context,
          const farandole::cuda::StreamRef& stream, Mode mode = global)
      : context_(std::move(context)), stream_(stream.handle()) {
    run([&] {
      return call<int(farandole::cuda::StreamHandle, int)>("cuStreamBeginCapture_v2")(stream_,
                                                                                      mode);
    });
  }
  ~Capture() {
    if (graph_ != nullptr) run([&] { return call<int(CUgraph_st*)>("cuGraphDestroy")(graph_); });
  }
  Capture(Capture&& other) noexcept
      : context_(std::move(other.context_)),
        stream_(other.stream_),
        graph_(std::exchange(other.graph_, nullptr)) {}
  Capture& operator=(Capture&&) = delete;
  /// The code that it comes to.
  int end() {
    return run([&] {
      return call<int(farandole::cuda::StreamHandle, CUgraph_st**)>("cuStreamEndCapture")(stream_,
                                                                                          &graph_);
    });
  }
  int launch(const farandole::cuda::StreamRef& stream) {
    return run([&] {
      return call<int(CUgraph_st*, farandole::cuda::StreamHandle)>("cuGraphLaunch")(
          graph_, stream.handle());
    });
  }

 private:
  template <typename Function>
  static Function* call(const char* name) {
    return reinterpret_cast<Function*>(
        ::dlsym(::dlopen(fake_driver().c_str(), RTLD_NOW | RTLD_LOCAL), name));
  }
  template <typename Act>
  int run(const Act& act) {
    const farandole::cuda::DeviceContext::Use use(*context_);
    return act();
  }

  std::shared_ptr<const farandole::cuda::DeviceContext> context_;
  farandole::cuda::StreamHandle stream_;
  CUgraph_st* graph_ = nullptr;
};

/// Captures stderr for the length of a scope.
class Stderr {
 public:
  Stderr() : file_(::memfd_create("stderr", MFD_CLOEXEC)), before_(::dup(STDERR_FILENO)) {
    ::dup2(file_.get(), STDERR_FILENO);
  }
  ~Stderr() { ::dup2(before_.get(), STDERR_FILENO); }
  Stderr(const Stderr&) = delete;
  Stderr& operator=(const Stderr&) = delete;

  std::string text() const {
    std::string all(1 << 16, 0);
    const ssize_t bytes = ::pread(file_.get(), all.data(), all.size(), 0);
    all.resize(bytes > 0 ? static_cast<size_t>(bytes) : 0);
    return all;
  }

 private:
  farandole::Fd file_, before_;
};

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace testing

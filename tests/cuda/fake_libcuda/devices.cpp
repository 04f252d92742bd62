// Errors' names, devices and their primary contexts.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "state.h"

using namespace farandole::cuda;
using namespace farandole::cuda::fake;

FAKE_CUDA cuGetErrorName(int code, const char** text) {
  // Names as they are in CUDA, but for a code that nobody knows.
  static auto* const names = [] {
    auto* made = new std::map<int, std::string>;
    for (const StatusRow& row : status_rows())
      (*made)[row.code] = "CUDA_ERROR_" + std::string(row.name);
    return made;
  }();
  const auto found = names->find(code);
  *text = found == names->end() ? nullptr : found->second.c_str();
  return found == names->end() ? kInvalidValue : kSuccess;
}

FAKE_CUDA cuGetErrorString(int code, const char** text) {
  static auto* const texts = new std::map<int, std::string>;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const std::string words = "the fake driver's words for " + std::to_string(code);
  *text = texts->try_emplace(code, words).first->second.c_str();
  return kSuccess;
}

namespace {

template <typename Body>
int of_device(const char* name, int device, const Body& body) {
  return call(name, Needs::driver, [&](State& all, Lock& lock, CUctx_st*) {
    if (device < 0 || device >= static_cast<int>(all.visible.size())) return kInvalidDevice;
    return body(all, lock);
  });
}

}  // namespace

FAKE_CUDA cuDeviceGetCount(int* count) {
  return call("cuDeviceGetCount", Needs::driver, [&](State& all, Lock&, CUctx_st*) {
    *count = static_cast<int>(all.visible.size());
    return kSuccess;
  });
}

FAKE_CUDA cuDeviceGet(int* device, int ordinal) {
  return of_device("cuDeviceGet", ordinal, [&](State&, Lock&) {
    *device = ordinal;
    return kSuccess;
  });
}

FAKE_CUDA cuDeviceGetName(char* name, int bytes, int device) {
  return of_device("cuDeviceGetName", device, [&](State& all, Lock&) {
    std::snprintf(name, static_cast<size_t>(bytes), "%s", all.config.name.c_str());
    return kSuccess;
  });
}

FAKE_CUDA cuDeviceGetUuid_v2(DeviceUuid* uuid, int device) {
  return of_device("cuDeviceGetUuid", device, [&](State& all, Lock&) {
    // The same in every process, whatever it sees.
    std::memset(uuid->bytes, 0xfa, sizeof uuid->bytes);
    uuid->bytes[15] = static_cast<char>(all.visible[static_cast<size_t>(device)]);
    return kSuccess;
  });
}

FAKE_CUDA cuDeviceTotalMem_v2(size_t* bytes, int device) {
  return of_device("cuDeviceTotalMem", device, [&](State& all, Lock&) {
    *bytes = all.config.memory;
    return kSuccess;
  });
}

FAKE_CUDA cuDeviceGetPCIBusId(char* text, int bytes, int device) {
  return of_device("cuDeviceGetPCIBusId", device, [&](State& all, Lock&) {
    std::snprintf(text, static_cast<size_t>(bytes), "0000:%02x:00.0",
                  all.visible[static_cast<size_t>(device)] + 1);
    return kSuccess;
  });
}

FAKE_CUDA cuDeviceGetAttribute(int* value, int attribute, int device) {
  return of_device("cuDeviceGetAttribute", device, [&](State& all, Lock&) {
    const Config& config = all.config;
    const std::map<int, int> attributes{
        {16, config.multiprocessors}, {75, config.capability / 10},  //
        {76, config.capability % 10}, {99, config.host_register},   {102, config.virtual_memory},
        {103, config.virtual_memory}, {132, config.multicast},      {133, config.mps},
    };
    const auto found = attributes.find(attribute);
    if (found == attributes.end()) return kInvalidValue;
    *value = found->second;
    return kSuccess;
  });
}

FAKE_CUDA cuDeviceCanAccessPeer(int* can, int device, int peer) {
  return of_device("cuDeviceCanAccessPeer", device, [&](State& all, Lock&) {
    if (peer < 0 || peer >= static_cast<int>(all.visible.size())) return kInvalidDevice;
    *can = device != peer && all.config.peers;
    return kSuccess;
  });
}

FAKE_CUDA cuDevicePrimaryCtxRetain(ContextHandle* context, int device) {
  return of_device("cuDevicePrimaryCtxRetain", device, [&](State& all, Lock&) {
    CUctx_st*& primary = all.primary[device];
    if (primary == nullptr) {
      primary = all.make<CUctx_st>();
      primary->device = device;
    }
    ++primary->retained;
    *context = primary;
    return primary->lost;
  });
}

FAKE_CUDA cuDevicePrimaryCtxRelease_v2(int device) {
  return of_device("cuDevicePrimaryCtxRelease", device, [&](State& all, Lock& lock) {
    const auto found = all.primary.find(device);
    if (found == all.primary.end()) {
      all.blame("a primary context is released that was not retained");
      return 201;
    }
    CUctx_st* const context = found->second;
    if (--context->retained > 0) return kSuccess;
    all.primary.erase(found);
    // The objects of a lost context can only be freed by its end, so they are no leak.
    if (const std::string left = all.alive_in(context); !left.empty() && context->lost == 0)
      all.blame("a context ends with " + left);
    end_streams(lock, context);
    free_all(all, context);
    return kSuccess;
  });
}

FAKE_CUDA cuCtxPushCurrent_v2(ContextHandle context) {
  return call("cuCtxPushCurrent", Needs::driver, [&](State& all, Lock&, CUctx_st*) {
    const bool known = std::ranges::any_of(
        all.primary, [&](const auto& entry) { return entry.second == context; });
    if (!known) {
      all.blame("a context is made current that has ended");
      return 201;
    }
    current_contexts().push_back(context);
    return kSuccess;
  });
}

FAKE_CUDA cuCtxPopCurrent_v2(ContextHandle* context) {
  return call("cuCtxPopCurrent", Needs::driver, [&](State&, Lock&, CUctx_st* current) {
    if (current == nullptr) return 201;
    *context = current;
    current_contexts().pop_back();
    return kSuccess;
  });
}

FAKE_CUDA cuCtxGetCurrent(ContextHandle* context) {
  return call("cuCtxGetCurrent", Needs::driver, [&](State&, Lock&, CUctx_st* current) {
    *context = current;
    return kSuccess;
  });
}

FAKE_CUDA cuCtxGetDevice(int* device) {
  return call("cuCtxGetDevice", Needs::context, [&](State&, Lock&, CUctx_st* current) {
    *device = current->device;
    return kSuccess;
  });
}

FAKE_CUDA cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return call("cuCtxGetStreamPriorityRange", Needs::context, [&](State&, Lock&, CUctx_st*) {
    *least = 0;
    *greatest = -5;
    return kSuccess;
  });
}

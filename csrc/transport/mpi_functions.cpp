#include "transport/mpi_functions.h"

#include <dlfcn.h>

#include <array>
#include <bit>
#include <cstring>
#include <type_traits>
#include <vector>

#include "base/error.h"

namespace farandole {
namespace {

constexpr int kSuccess = 0;     // MPI_SUCCESS, in the standard itself
constexpr size_t kText = 4096;  // more than MPI_MAX_ERROR_STRING of any

/// The extension module, which its import has loaded with all that it is linked to.
class Library {
 public:
  explicit Library(const std::string& path)
      : handle_(::dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD)) {
    if (handle_ == nullptr)
      throw Error(ErrorCode::link, "mpi4py's module " + path + " is not loaded");
  }

  template <typename Function>
  Function* find(const char* name) const {
    void* const found = ::dlsym(handle_, name);
    if (found == nullptr)
      throw Error(ErrorCode::link, "the MPI of mpi4py has no function " + std::string(name), {},
                  "use an MPI of version 3 or later");
    return reinterpret_cast<Function*>(found);
  }

 private:
  void* handle_;  // never closed: MPI does not end before the process does
};

template <typename Handle>
Handle handle_from(uint64_t number) {
  if constexpr (std::is_pointer_v<Handle>)
    return std::bit_cast<Handle>(number);
  else
    return static_cast<Handle>(number);  // its low 4 bytes
}

/// The functions, as they are where handles are of this type.
template <typename Handle>
class Bound : public MpiFunctions {
 public:
  explicit Bound(const MpiBinding& binding)
      : library_(binding.module),
        binding_(binding),
        byte_(handle_of(binding.byte)),
        self_(handle_of(binding.self)),
        communicator_(handle_of(binding.communicator)),
        status_(binding.status_bytes) {}

  MpiRequest send(std::span<const std::byte> bytes, int to, int tag) override {
    Handle request{};
    check(isend_(bytes.data(), static_cast<int>(bytes.size()), byte_, to, tag, communicator_,
                 &request),
          "MPI_Isend", to);
    return {number_of(request)};
  }

  MpiRequest receive(std::span<std::byte> into, int from, int tag) override {
    Handle request{};
    check(irecv_(into.data(), static_cast<int>(into.size()), byte_, from, tag, communicator_,
                 &request),
          "MPI_Irecv", from);
    return {number_of(request)};
  }

  bool test(MpiRequest& request, size_t* bytes) override {
    Handle handle = handle_of(request.handle);
    int complete = 0;
    check(test_(&handle, &complete, status_.data()), "MPI_Test");
    request.handle = number_of(handle);
    if (complete == 0) return false;
    if (bytes != nullptr) {
      int count = 0;
      check(get_count_(status_.data(), byte_, &count), "MPI_Get_count");
      *bytes = count < 0 ? 0 : static_cast<size_t>(count);
    }
    return true;
  }

  void cancel(MpiRequest& request) override {
    Handle handle = handle_of(request.handle);
    check(cancel_(&handle), "MPI_Cancel");
    request.handle = number_of(handle);
  }

  bool folds(DType dtype, ReduceOp op) const override {
    return binding_.dtypes[index(dtype)] && binding_.ops[index(op)];
  }

  MpiRequest duplicate(uint64_t& made) override {
    Handle request{};
    check(duplicate_(communicator_, reinterpret_cast<Handle*>(&made), &request), "MPI_Comm_idup");
    return {number_of(request)};
  }

  void adopt(uint64_t& made) override {
    Handle communicator{};
    std::memcpy(static_cast<void*>(&communicator), &made, sizeof communicator);
    made = number_of(communicator);
    check(set_errors_(communicator, handle_of(binding_.returns)), "MPI_Comm_set_errhandler");
  }

  MpiRequest all_reduce(const std::byte* input, std::byte* output, size_t count, DType dtype,
                        ReduceOp op, uint64_t communicator) override {
    const void* const in_place = std::bit_cast<const void*>(binding_.in_place);
    Handle request{};
    check(
        all_reduce_(input == output ? in_place : input, output, static_cast<int>(count),
                    handle_of(binding_.dtypes[index(dtype)].value()),
                    handle_of(binding_.ops[index(op)].value()), handle_of(communicator), &request),
        "MPI_Iallreduce");
    return {number_of(request)};
  }

  /// MPI_Finalize begins with the attributes of MPI_COMM_SELF, while all else still works.
  void at_finalize(void (*act)()) override {
    int key = 0;
    const auto create = library_.find<CreateKey>("MPI_Comm_create_keyval");
    const auto set = library_.find<int(Handle, int, void*)>("MPI_Comm_set_attr");
    check(create(&copy_nothing, &run, &key, reinterpret_cast<void*>(act)),
          "MPI_Comm_create_keyval");
    check(set(self_, key, nullptr), "MPI_Comm_set_attr");
  }

 private:
  using Copy = int(Handle, int, void*, void*, void*, int*);
  using Delete = int(Handle, int, void*, void*);
  using CreateKey = int(Copy*, Delete*, int*, void*);

  static int copy_nothing(Handle, int, void*, void*, void*, int* copied) {
    *copied = 0;
    return kSuccess;
  }
  static int run(Handle, int, void*, void* act) {
    reinterpret_cast<void (*)()>(act)();
    return kSuccess;
  }

  static Handle handle_of(uint64_t number) { return handle_from<Handle>(number); }
  static uint64_t number_of(Handle handle) {
    if constexpr (std::is_pointer_v<Handle>)
      return std::bit_cast<uint64_t>(handle);
    else
      return static_cast<uint64_t>(static_cast<uint32_t>(handle));
  }

  void check(int code, const char* function, int peer = -1) const {
    if (code == kSuccess) return;
    std::array<char, kText> text{};
    int length = 0;
    if (error_string_(code, text.data(), &length) != kSuccess) length = 0;
    Context where;
    where.peer = peer;
    where.evidence = "MPI says: " + std::string(text.data(), static_cast<size_t>(length));
    throw Error(ErrorCode::link,
                std::string(function) + " failed with code " + std::to_string(code), where);
  }

  Library library_;
  MpiBinding binding_;
  Handle byte_, self_, communicator_;
  std::vector<std::byte> status_;

  int (*isend_)(const void*, int, Handle, int, int, Handle, Handle*) =
      library_.find<int(const void*, int, Handle, int, int, Handle, Handle*)>("MPI_Isend");
  int (*irecv_)(void*, int, Handle, int, int, Handle, Handle*) =
      library_.find<int(void*, int, Handle, int, int, Handle, Handle*)>("MPI_Irecv");
  int (*test_)(Handle*, int*, void*) = library_.find<int(Handle*, int*, void*)>("MPI_Test");
  int (*get_count_)(const void*, Handle,
                    int*) = library_.find<int(const void*, Handle, int*)>("MPI_Get_count");
  int (*cancel_)(Handle*) = library_.find<int(Handle*)>("MPI_Cancel");
  int (*duplicate_)(Handle, Handle*,
                    Handle*) = library_.find<int(Handle, Handle*, Handle*)>("MPI_Comm_idup");
  int (*set_errors_)(Handle,
                     Handle) = library_.find<int(Handle, Handle)>("MPI_Comm_set_errhandler");
  int (*all_reduce_)(const void*, void*, int, Handle, Handle, Handle, Handle*) =
      library_.find<int(const void*, void*, int, Handle, Handle, Handle, Handle*)>(
          "MPI_Iallreduce");
  int (*error_string_)(int, char*, int*) = library_.find<int(int, char*, int*)>("MPI_Error_string");
};

template <typename Handle>
class BoundExit : public MpiExit {
 public:
  explicit BoundExit(const MpiBinding& binding)
      : library_(binding.module), world_(handle_from<Handle>(binding.world)) {}

  bool is_finalized() override {
    int finalized = 0;
    return finalized_(&finalized) != kSuccess || finalized != 0;
  }
  void finalize() override { finalize_(); }
  void abort(int code) override { abort_(world_, code); }

 private:
  Library library_;
  Handle world_;
  int (*finalized_)(int*) = library_.find<int(int*)>("MPI_Finalized");
  int (*finalize_)() = library_.find<int()>("MPI_Finalize");
  int (*abort_)(Handle, int) = library_.find<int(Handle, int)>("MPI_Abort");
};

template <typename Interface, template <typename> typename Of>
std::unique_ptr<Interface> bound_to(const MpiBinding& binding) {
  if (binding.handle_bytes == sizeof(int)) return std::make_unique<Of<int>>(binding);
  if (binding.handle_bytes == sizeof(void*)) return std::make_unique<Of<void*>>(binding);
  throw Error(ErrorCode::link, "handles of this MPI have " + std::to_string(binding.handle_bytes) +
                                   " bytes; those of every known one have 4 or 8");
}

}  // namespace

std::unique_ptr<MpiFunctions> bind_mpi(const MpiBinding& binding) {
  return bound_to<MpiFunctions, Bound>(binding);
}

std::unique_ptr<MpiExit> bind_mpi_exit(const MpiBinding& binding) {
  return bound_to<MpiExit, BoundExit>(binding);
}

}  // namespace farandole

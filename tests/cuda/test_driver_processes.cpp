// Two processes and one device: memory by descriptor, and by the older handles. The second process
// is this program again, running one test, with a socket to the first.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>

#include "cuda/driver/memory.h"
#include "cuda/driver/peer_memory.h"
#include "cuda/driver/stream.h"
#include "fake.h"

using namespace farandole;
using namespace farandole::cuda;
using testing::contains;
using testing::fake;
using testing::FreshDriver;

namespace {

constexpr size_t kBytes = 4096;
constexpr char kSocket[] = "FARANDOLE_TEST_SOCKET";

/// The parts of a MemoryExport that are plain bytes.
struct Letter {
  AllocationId id;
  DeviceUuid device;
  uint64_t bytes;
  ExportKind kind;
  IpcMemoryHandle handle;
};

void send(int socket, const MemoryExport& shared) {
  Letter letter{shared.id, shared.device, shared.bytes, shared.kind, shared.handle};
  iovec part{&letter, sizeof letter};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (shared.descriptor) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    const int descriptor = shared.descriptor.get();
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  checked(::sendmsg(socket, &message, 0), "sendmsg");
}

MemoryExport receive(int socket) {
  Letter letter{};
  iovec part{&letter, sizeof letter};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  checked(::recvmsg(socket, &message, MSG_CMSG_CLOEXEC), "recvmsg");
  MemoryExport shared{letter.id, letter.device, letter.bytes, letter.kind, letter.handle, Fd()};
  if (const cmsghdr* const header = CMSG_FIRSTHDR(&message)) {
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
    shared.descriptor = Fd(descriptor);
  }
  return shared;
}

/// One byte, and how both wait for each other.
void tell(int socket, char word) { checked(::write(socket, &word, 1), "write"); }
char hear(int socket) {
  char word = 0;
  return ::read(socket, &word, 1) == 1 ? word : '-';
}

/// The other process.
class Other {
 public:
  explicit Other(const char* test) {
    int both[2];
    checked(::socketpair(AF_UNIX, SOCK_STREAM, 0, both), "socketpair");
    socket_ = Fd(both[0]);
    ::setenv(kSocket, std::to_string(both[1]).c_str(), 1);
    process_ = checked(::fork(), "fork");
    if (process_ == 0) {
      ::close(both[0]);
      ::execl("/proc/self/exe", "tests", test, nullptr);
      ::_exit(1);
    }
    ::unsetenv(kSocket);
    ::close(both[1]);
  }
  ~Other() {
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  Other(const Other&) = delete;
  Other& operator=(const Other&) = delete;

  int socket() const { return socket_.get(); }
  bool ends_well() const {
    int status = -1;
    ::waitpid(process_, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  void kill() const {
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }

 private:
  Fd socket_;
  pid_t process_ = -1;
};

std::byte value_in(const DeviceAddress& memory,
                   const std::shared_ptr<const DeviceContext>& context) {
  const PinnedMemory staging(context, kBytes);
  const DeviceStream stream(context);
  stream.copy(staging.address(), memory.address(), kBytes);
  stream.synchronize();
  return staging.host()[kBytes - 1];
}

void fill(const DeviceAddress& memory, const std::shared_ptr<const DeviceContext>& context,
          uint8_t value) {
  const DeviceStream stream(context);
  stream.fill(memory.address(), value, kBytes);
  stream.synchronize();
}

void exchange(bool virtual_memory) {
  const FreshDriver fresh;
  fake().configure("virtual_memory", virtual_memory ? "1" : "0");
  const auto context = fresh.context();
  auto memory = allocate_device(context, kBytes, Sharing::processes);
  fill(*memory, context, 7);
  const Other other("other_process_maps_memory");
  send(other.socket(), memory->share());
  CHECK_EQUAL(hear(other.socket()), 'w');  // it has written
  CHECK(value_in(*memory, context) == std::byte{9});
  tell(other.socket(), 'c');
  CHECK_EQUAL(hear(other.socket()), 'c');  // it has let go
  memory.reset();
  tell(other.socket(), 'e');
  CHECK(other.ends_well());
}

}  // namespace

/// Does nothing unless another one started it.
TEST(other_process_maps_memory) {
  const char* const number = std::getenv(kSocket);
  if (number == nullptr) return;
  const int socket = std::atoi(number);
  const FreshDriver fresh;
  const auto context = fresh.context();
  PeerMappings peers(context);
  const MemoryExport shared = receive(socket);
  CHECK(shared.id.process != own_process());
  CHECK(shared.device == context->device().uuid);
  auto mapped = peers.map(shared);
  CHECK(peers.map(shared) == mapped);
  CHECK(value_in(*mapped, context) == std::byte{7});
  fill(*mapped, context, 9);
  tell(socket, 'w');
  CHECK_EQUAL(hear(socket), 'c');
  mapped.reset();
  tell(socket, 'c');
  CHECK_EQUAL(hear(socket), 'e');
}

TEST(processes_share_memory_by_descriptor) { exchange(true); }
TEST(processes_share_memory_by_ipc_handle) { exchange(false); }

TEST(opening_another_process_memory_fails) {
  const FreshDriver fresh;
  fake().configure("virtual_memory", "0");
  const auto context = fresh.context();
  PeerMappings peers(context);
  MemoryExport shared;
  shared.device = context->device().uuid;
  shared.kind = ExportKind::ipc;
  shared.bytes = kBytes;
  for (const StatusRow& row : status_rows()) {
    if (row.lasting) continue;
    fake().fail("cuIpcOpenMemHandle", 1, row.code);
    CHECK_THROWS(peers.map(shared), Error,
                 e.code() == row.kind && e.verdict() ==
                                             "cannot use another process's memory on "
                                             "device 0 (Fake GPU): " +
                                                 std::string(row.meaning));
  }
}

TEST(memory_by_ipc_handle_is_not_freed_before_it_is_closed) {
  FreshDriver fresh;
  fresh.expected_misuse = "cuMemFree while another process has the memory open\n";
  fake().configure("virtual_memory", "0");
  const auto context = fresh.context();
  auto memory = allocate_device(context, kBytes, Sharing::processes);
  auto second = allocate_device(context, kBytes, Sharing::processes);
  fill(*memory, context, 7);
  {
    const Other other("other_process_maps_memory");
    send(other.socket(), memory->share());
    CHECK_EQUAL(hear(other.socket()), 'w');
    memory.reset();
  }
  // A process that was killed has closed everything.
  fill(*second, context, 7);
  const Other other("other_process_maps_memory");
  send(other.socket(), second->share());
  CHECK_EQUAL(hear(other.socket()), 'w');
  other.kill();
  second.reset();
}

// Ranks that are threads meet over the abstract socket, and whoever does not belong is told so.
#include "control/rendezvous.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "check.h"
#include "control/local_socket.h"
#include "control/meeting_words.h"
#include "world.h"

using namespace farandole;

namespace {

constexpr size_t kArenaOfEach = 1 << 20;

Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

Invitation invitation(const std::string& job, int rank, int size) {
  return {rank, size, "test " + std::to_string(::getpid()) + " " + job, kArenaOfEach, "level=x"};
}

/// What meet() throws, or "met".
std::string outcome(const Invitation& me, Deadline deadline) {
  try {
    const Host host = meet(me, deadline);
    CHECK_EQUAL(host.rank, me.rank);
    return "met";
  } catch (const Error& error) {
    return error.what();
  }
}

/// The abstract name under which rank 0 of `job` listens: looked up, not computed.
std::string listening_name(const std::string& job) {
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);) {
    const size_t at = line.find("@farandole-");
    const std::string end = "test " + std::to_string(::getpid()) + " " + job;
    if (at != std::string::npos && line.ends_with(end)) return line.substr(at + 1);
  }
  return "";
}

Fd dial(const std::string& job) {
  std::string name;
  while ((name = listening_name(job)).empty()) std::this_thread::yield();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  Fd socket(checked(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), "socket"));
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  checked(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length), "connect");
  return socket;
}

}  // namespace

TEST(rendezvous_brings_five_ranks_together) {
  constexpr int kMembers = 5;
  std::mutex mutex;
  std::vector<std::shared_ptr<Segment>> segments(kMembers);
  testing::run_ranks(kMembers, [&](int rank) {
    const Host host = meet(invitation("five", rank, kMembers), soon());
    CHECK_EQUAL(host.size(), kMembers);
    for (int r = 0; r < kMembers; ++r) {
      const HostPeer& peer = host.peers[static_cast<size_t>(r)];
      CHECK_EQUAL(peer.info.rank, r);
      CHECK_EQUAL(peer.info.pid, ::getpid());
      CHECK(peer.doorbell && peer.process && peer.cpus.any());
    }
    host.segment->arena(rank)[0] = static_cast<std::byte>(rank + 1);
    const std::lock_guard lock(mutex);
    segments[static_cast<size_t>(rank)] = host.segment;
  });
  for (const auto& segment : segments)  // each mapped it for itself: it is one memory
    for (int r = 0; r < kMembers; ++r) CHECK(segment->arena(r)[0] == static_cast<std::byte>(r + 1));
}

TEST(rendezvous_hands_out_rank_zeros_words_and_no_others) {
  for (const std::string& words : {std::string(), std::string(kMostHandedOut, 'x')}) {
    testing::run_ranks(3, [&](int rank) {
      Invitation me = invitation("words " + std::to_string(words.size()), rank, 3);
      me.hand_out = rank == 0 ? words : "of rank " + std::to_string(rank);
      CHECK_EQUAL(meet(me, soon()).handed_out, words);
    });
  }
  Invitation alone = invitation("alone", 0, 1);
  alone.hand_out = "mine";
  CHECK_EQUAL(meet(alone, soon()).handed_out, "mine");
  alone.hand_out = std::string(kMostHandedOut + 1, 'x');
  CHECK(outcome(alone, soon()).find("hands out more than fits") != std::string::npos);
}

TEST(rendezvous_names_the_missing_ranks) {
  testing::run_ranks(2, [&](int rank) {
    const std::string told =
        outcome(invitation("missing", rank, 4), Deadline::after(std::chrono::seconds(2)));
    CHECK(told.find("missing: 2-3") != std::string::npos ||
          (rank == 1 && told.find("not all ranks arrived") != std::string::npos));
  });
}

TEST(rendezvous_tells_everybody_of_a_duplicate_rank) {
  std::atomic<int> told{0};
  testing::run_ranks(3, [&](int thread) {  // ranks 0, 1 and 1 of three
    const std::string text = outcome(invitation("twice", std::min(thread, 1), 3), soon());
    if (text.find("two processes are rank 1") != std::string::npos) ++told;
  });
  CHECK_EQUAL(told.load(), 3);
}

TEST(rendezvous_tells_everybody_of_another_world_size) {
  std::atomic<int> told{0};
  testing::run_ranks(2, [&](int rank) {
    const std::string text = outcome(invitation("sizes", rank, 2 + rank), soon());
    if (text.find("was started for a world of 3") != std::string::npos) ++told;
  });
  CHECK_EQUAL(told.load(), 2);
}

TEST(rendezvous_can_be_tried_again_at_once_after_a_refusal) {
  testing::run_ranks(2, [&](int rank) {
    for (int i = 0; i < 50; ++i) {
      CHECK(outcome(invitation("again", rank, 2 + rank), soon()).find("world of 3") !=
            std::string::npos);
      CHECK_EQUAL(outcome(invitation("again", rank, 2), soon()), "met");
    }
  });
}

TEST(rendezvous_refuses_ranks_that_cannot_be) {
  CHECK_THROWS(meet(invitation("none", 2, 2), soon()), Error, e.code() == ErrorCode::rendezvous);
  CHECK_THROWS(meet(invitation("none", -1, 2), soon()), Error, e.code() == ErrorCode::rendezvous);
  CHECK_EQUAL(meet(invitation("alone", 0, 1), soon()).size(), 1);
}

TEST(rendezvous_does_not_mind_strangers) {
  std::vector<std::string> told(2);
  // A stranger may stay silent for five seconds.
  const Deadline sooner = Deadline::after(std::chrono::seconds(4));
  std::thread host([&] { told[0] = outcome(invitation("strangers", 0, 2), sooner); });
  const Fd silent = dial("strangers");  // says nothing, and holds nobody up
  const Fd rude = dial("strangers");
  CHECK(::send(rude.get(), "hello?", 6, MSG_NOSIGNAL) == 6);
  std::string garbage(5000, 'x');
  const Fd loud = dial("strangers");
  CHECK(::send(loud.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL) == 5000);
  {
    const Fd fickle = dial("strangers");
  }
  told[1] = outcome(invitation("strangers", 1, 2), sooner);
  host.join();
  CHECK_EQUAL(told[0], "met");
  CHECK_EQUAL(told[1], "met");
}

TEST(rendezvous_ends_for_all_when_a_rank_leaves_its_seat) {
  std::vector<std::string> told(2);
  std::thread host([&] { told[0] = outcome(invitation("seat", 0, 3), soon()); });
  std::thread guest([&] { told[1] = outcome(invitation("seat", 1, 3), soon()); });
  {
    const Fd fickle = dial("seat");
    Greeting greeting{};
    CHECK(receive_message(fickle.get(), &greeting, sizeof greeting));
    const Hello hello = hello_from(invitation("seat", 2, 3));
    const Fd doorbell = make_event_fd(), process = own_process();
    const int given[] = {doorbell.get(), process.get()};
    CHECK(send_message(fickle.get(), &hello, sizeof hello, given));
    Answer answer{};
    std::vector<Fd> memory;
    CHECK(receive_message(fickle.get(), &answer, sizeof answer, &memory));
    CHECK_EQUAL(answer.accepted, 1u);
  }
  host.join();
  guest.join();
  for (const std::string& text : told)
    CHECK(text.find("rank 2 of 3 (pid " + std::to_string(::getpid()) +
                    ") left while the ranks met") != std::string::npos);
}

TEST(rendezvous_knows_a_process_of_another_user) {
  int ends[2];
  checked(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), "socketpair");
  const Fd mine(ends[0]), theirs(ends[1]);
  CHECK(same_user(mine.get()));
  if (::geteuid() != 0) return;  // nobody else can become another user
  const pid_t child = ::fork();
  if (child == 0) ::_exit(::seteuid(65534) == 0 && same_user(mine.get()) ? 1 : 0);
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK_EQUAL(status, 0);
}

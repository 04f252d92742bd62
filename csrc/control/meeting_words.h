// What ranks say to each other while they meet: rank 0 greets, a guest says Hello, is given a seat,
// says that it has all it needs, and hears from rank 0 that everybody has. One build's structs,
// but for Hello; both ends are on one host.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "control/host.h"
#include "control/local_socket.h"
#include "control/rendezvous.h"

namespace farandole {

inline constexpr uint32_t kMeetingProtocol = 4;

/// Rank 0's first word on every connection: somebody else may hold the job's name.
struct Greeting {
  char text[24];
};
inline constexpr Greeting kGreeting{"farandole: rank 0 here"};

/// Of any version it has this size, and begins like this: so that another version is known as such.
struct Hello {
  uint32_t protocol;
  int32_t rank, size;
  int32_t pid;
  char version[32];
  uint64_t cpus[16];
  char settings[320];
  char agree[kMostAgreed + 4];
  int32_t trouble_code;  // why it cannot join, if `trouble` says anything
  char trouble[256];
  char unused[64];
};
static_assert(sizeof(Hello) == 1024);

/// Yes, or the error that ends the meeting on every rank.
struct Answer {
  uint32_t accepted;
  int32_t code;  // of the error, as what follows
  int32_t rank, pid;
  char text[kMostHandedOut + 1];  // its verdict; with a yes and a seat, what rank 0 hands out
  char advice[256];
};

struct Seat {  // one row of what comes with a seat, by rank
  int32_t pid;
  uint64_t cpus[16];
};
/// So many in one message, each with two descriptors.
inline constexpr size_t kSeatsAtOnce = kMostDescriptors / 2;

Hello hello_from(const Invitation& me);
Seat seat_from(const Hello& hello);
CpuSet cpus_of(const Seat& member);
/// "rank 1 of 3 (pid 77)".
std::string who(const Hello& hello);

/// What a rank has once it has its seat: `members` are those of this host, in order of their ranks,
/// `fds` their doorbells and processes.
Host seated(const Invitation& me, std::shared_ptr<Segment> segment,
            const std::vector<Seat>& members, std::vector<Fd> fds, std::string handed_out);

/// False when the other end is gone.
bool send_refusal(int socket, const Error& error);
/// As another rank has sent it: rendezvous, where it is none.
ErrorCode code_in(int32_t number);
Error refusal_in(const Answer& answer);
/// What went wrong on one rank, as all are told it.
Error as_told(const Hello& by, const Error& error);

}  // namespace farandole

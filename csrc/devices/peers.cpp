#include "devices/peers.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/fixed_text.h"
#include "base/hash.h"
#include "control/local_socket.h"

namespace farandole {
namespace {

/// Known to the job's ranks alone.
uint64_t secret_key(const Host& host, uint64_t key) {
  Hash hash;
  hash.add(key);
  const std::span<const std::byte, 32> secret = host.segment->secret();
  hash.add(std::string_view(reinterpret_cast<const char*>(secret.data()), secret.size()));
  return hash.value();
}

void make_non_blocking(int fd) {
  checked(::fcntl(fd, F_SETFL, checked(::fcntl(fd, F_GETFL), "fcntl") | O_NONBLOCK), "fcntl");
}

}  // namespace

PeerMeeting::PeerMeeting(const Host& host, const Membership& membership, uint64_t key,
                         PeerOffer mine, Use use, Check check)
    : membership_(membership),
      key_(secret_key(host, key)),
      mine_(std::move(mine)),
      use_(std::move(use)),
      check_(std::move(check)),
      peers_(membership.members.size()) {
  refusal_ = mine_.refusal;
}

std::string PeerMeeting::address_of(int r) const {
  return "device-" + std::to_string(key_) + "-" + std::to_string(r);
}

void PeerMeeting::listen() {
  listener_ = make_local_socket();
  const LocalAddress address(address_of(membership_.rank));
  checked(::bind(listener_.get(), address.get(), address.length), "bind");
  checked(::listen(listener_.get(), static_cast<int>(peers_.size())), "listen");
  make_non_blocking(listener_.get());
}

bool PeerMeeting::poll() {
  bool moved = false;
  if (!listener_) {
    listen();
    moved = true;
  }
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (r != membership_.rank) moved |= send_to(r);
  moved |= take_in();
  if (round_ == offers_ && said(offers_)) {
    use_all();
    round_ = used_;
    moved = true;
  }
  if (round_ == used_ && said(used_) && check_all()) {
    round_ = checked_;
    moved = true;
  }
  if (done()) {
    conclude();
    moved = true;
  }
  return moved;
}

PeerMeeting::Letter PeerMeeting::letter(int round) const {
  Letter letter{.key = key_,
                .from = membership_.rank,
                .round = round,
                .notes = notes_,
                .data = mine_.data,
                .refusal = {}};
  copy_cut(refusal_, letter.refusal);
  return letter;
}

/// Sends the message that is due. False if there is none, or the other rank does not listen yet.
bool PeerMeeting::send_to(int r) {
  Peer& peer = peers_[static_cast<size_t>(r)];
  if (peer.sent > round_) return false;
  if (!peer.to) {
    Fd socket = make_local_socket();
    if (!connect_at_once(socket.get(), LocalAddress(address_of(r)))) return false;
    if (!same_user(socket.get()))
      throw Error(ErrorCode::authentication, "a rank of this job runs as another user");
    make_non_blocking(socket.get());
    peer.to = std::move(socket);
  }
  const Letter due = letter(peer.sent);
  const int descriptor = mine_.descriptor.get();
  const bool gives = peer.sent == offers_ && mine_.descriptor;
  if (!send_message(peer.to.get(), &due, sizeof due, {&descriptor, gives ? size_t{1} : 0}))
    return false;
  ++peer.sent;
  return true;
}

bool PeerMeeting::take_in() {
  bool moved = false;
  for (;;) {
    Fd stranger(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!stranger) break;
    if (same_user(stranger.get())) strangers_.push_back(std::move(stranger));
    moved = true;
  }
  std::erase_if(strangers_, [&](Fd& stranger) {
    Peer* known = nullptr;
    if (!hear(stranger, known)) return false;
    moved = true;
    if (known != nullptr) known->from = std::move(stranger);
    return true;
  });
  for (Peer& peer : peers_)
    for (Peer* known = &peer; peer.from && !peer.heard[checked_] && hear(peer.from, known);)
      moved = true;
  return moved;
}

/// Reads one message. Sets `peer` to the sender, or leaves it null if the sender is unknown.
bool PeerMeeting::hear(Fd& socket, Peer*& peer) {
  Letter letter{};
  std::vector<Fd> descriptors;
  errno = 0;
  if (!receive_message(socket.get(), &letter, sizeof letter, &descriptors)) {
    const bool gone = errno != EAGAIN && errno != EINTR;
    if (gone && peer != nullptr) socket.reset();  // the stream notices the peer's death
    return gone && peer == nullptr;
  }
  const bool known = letter.key == key_ && letter.from >= 0 &&
                     letter.from < static_cast<int>(peers_.size()) &&
                     letter.from != membership_.rank && letter.round >= 0 && letter.round < rounds_;
  if (!known) return true;
  peer = &peers_[static_cast<size_t>(letter.from)];
  peer->heard[letter.round] = letter;
  if (!descriptors.empty()) peer->descriptor = std::move(descriptors.front());
  return true;
}

bool PeerMeeting::said(int round) const {
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (r != membership_.rank && !peers_[static_cast<size_t>(r)].heard[round]) return false;
  return true;
}

bool PeerMeeting::told(int round) const {
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (r != membership_.rank && peers_[static_cast<size_t>(r)].sent <= round) return false;
  return true;
}

bool PeerMeeting::somebody_refuses(int round) const {
  return std::ranges::any_of(peers_, [&](const Peer& peer) {
    return peer.heard[round] && peer.heard[round]->refusal[0] != 0;
  });
}

/// Does nothing if some rank has no offer, or could not use the others': then none is of any use.
void PeerMeeting::use_all() {
  if (!refusal_.empty() || somebody_refuses(offers_) || somebody_refuses(used_)) return;
  std::vector<PeerOffered> all;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    const Peer& peer = peers_[static_cast<size_t>(r)];
    const bool mine = r == membership_.rank;
    all.push_back({mine ? mine_.data : peer.heard[offers_]->data,
                   mine ? mine_.descriptor.get() : peer.descriptor.get()});
  }
  try {
    use_(all);
  } catch (const Error& error) {
    refusal_ = error.verdict();
  } catch (const std::exception& error) {  // no memory, say; the others wait for an answer
    refusal_ = error.what();
  }
}

/// Whether there is an answer. There is nothing to look at where some rank refuses.
bool PeerMeeting::check_all() {
  if (!refusal_.empty() || somebody_refuses(used_)) return true;
  try {
    const std::optional<uint32_t> notes = check_();
    notes_ |= notes.value_or(0);
    return notes.has_value();
  } catch (const Error& error) {
    refusal_ = error.verdict();
    return true;
  }
}

void PeerMeeting::conclude() {
  std::string first;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    const Peer& peer = peers_[static_cast<size_t>(r)];
    const bool mine = r == membership_.rank;
    std::string theirs =
        mine ? std::string(letter(checked_).refusal) : text_in(peer.heard[checked_]->refusal);
    if (!mine) notes_ |= peer.heard[checked_]->notes;
    if (!theirs.empty() && first.empty())
      first = "rank " + std::to_string(membership_.members[static_cast<size_t>(r)]) + ": " +
              std::move(theirs);
  }
  refusal_ = std::move(first);
}

PeerParting PeerMeeting::parting() {
  if (listener_) take_in();  // ranks that have connected, and sent nothing yet
  std::vector<Fd> to;
  std::vector<PeerParting::From> from;
  for (Fd& stranger : strangers_) from.push_back({-1, std::move(stranger)});
  for (size_t r = 0; r < peers_.size(); ++r) {
    if (peers_[r].to) to.push_back(std::move(peers_[r].to));
    if (peers_[r].from) from.push_back({static_cast<int>(r), std::move(peers_[r].from)});
  }
  return {std::move(to), std::move(from)};
}

std::vector<int> PeerMeeting::silent() const {
  std::vector<int> missing;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (r != membership_.rank && !peers_[static_cast<size_t>(r)].heard[checked_])
      missing.push_back(r);
  return missing;
}

}  // namespace farandole

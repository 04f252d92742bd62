// The agreement of ranks that map one segment: each looks at the others' pages.
#pragma once

#include <memory>

#include "stream/agreement.h"

namespace farandole {

class PageAgreement : public StreamAgreement {
 public:
  /// Puts this rank's page where the members find it; fills in `memory.pages` as they open theirs.
  /// `memory` and `arena` outlive it.
  PageAgreement(StreamMemory& memory, Arena& arena, uint64_t key, uint32_t first_sequence);
  ~PageAgreement() override;

  bool open() override;
  void post(uint64_t ticket, std::span<const std::byte> data) override;
  Posts compare() override { return compare_posts(memory_); }
  void describe(const Descriptor& mine, std::span<const BundledArray> arrays) override;
  std::optional<std::vector<Shown>> described() override;
  bool settled() override;
  void complete(uint32_t sequence) override;

  bool has_opened(int r) const override { return page_of(r) != nullptr; }
  std::optional<uint32_t> begun(int r) const override;
  std::optional<uint32_t> completed(int r) const override;
  bool knows_all_of(int) const override { return true; }  // its page stays
  bool has_closed(int r) const override;
  std::vector<int> silent() const override;
  bool is_inside(int r) const override;

  void show_holdups(std::span<const int> ranks, TimePoint when) override;
  std::vector<int> holdups_of(int r) const override;
  std::optional<ClosedPage> leave_behind() const override;

 private:
  const StreamPage* page_of(int r) const { return memory_.pages[static_cast<size_t>(r)]; }
  int world_rank() const { return memory_.members[static_cast<size_t>(memory_.rank)]; }
  Shown shown_by(int r) const;
  bool all_reached(Word StreamPage::* stage) const;

  StreamMemory& memory_;
  Arena& arena_;
  uint64_t key_;
  bool open_ = false;
  std::byte* shown_arrays_ = nullptr;  // in the arena, while ranks that disagree compare
};

}  // namespace farandole
